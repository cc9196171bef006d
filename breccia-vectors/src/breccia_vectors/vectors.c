/* Checks golden vectors (spec/vectors.md) bit for bit: decodes all cases, and casts those of E8M0 scales by "rceil" and "mse".
 *
 *     cc -std=c99 -O2 -o vectors vectors.c -lm && ./vectors spec/vectors/7
 *
 * A second argument names a file for its results, which `python -m breccia_vectors compare` reads: how a program in any language
 * is checked. Written from the pages of spec/ alone, for little-endian machines. Arithmetic is in double, wide enough for
 * products and sums of two FP32 numbers: the conversion to float is the one rounding. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char name[16], kind[16]; int bits; long first, bias, nan, inf; } codec;
static codec codecs[64];
static unsigned char *held;
static long count, axis;

static codec *named(const char *name) {
    for (long i = 0; i < count; i++) if (!strcmp(codecs[i].name, name)) return codecs + i;
    exit(fprintf(stderr, "no codec %s\n", name));
}
static double value(const codec *c, uint32_t code) { /* formats.md, "Codecs"; code as it is stored */
    long sign = *c->kind != 'm' && code >> (c->bits - 1), u = sign || *c->kind != 'm' ? code & ((1u << (c->bits - 1)) - 1) : code;
    float listed;
    if (*c->kind == 't') return memcpy(&listed, held + c->first + 4 * code, 4), listed;
    if (*c->kind == 'p') return (long)code == c->nan ? NAN : ldexp(1, (int)(code - c->bias));
    if (*c->kind != 'f' && *c->kind != 'm') return ldexp((double)code - (*c->kind == 's' && sign ? 1L << c->bits : 0), -(int)c->first);
    if (c->inf < 0 ? u == c->nan || (long)code == c->nan : u > c->inf) return NAN; /* FNUZ: in place of -0 */
    long whole = 1L << c->first, e = u / whole;
    double v = u == c->inf ? INFINITY : ldexp(u % whole + (e ? whole : 0), (int)((e ? e : 1) - c->bias - c->first));
    return sign ? -v : v;
}
static uint32_t item(long part, long i, int bits) { /* item i of a part, of 1, 2 or 4 bytes */
    uint32_t word = 0;
    memcpy(&word, held + part + i * ((bits + 7) / 8), (bits + 7) / 8);
    return word;
}
static long at(long l, long i, long j, long rows, long columns) { /* the stored place of element j of row i, K last */
    return l * rows * columns + (axis == -1 ? i * columns + j : j * rows + i);
}
static void write_part(FILE *file, long set, long n, const char *part, const void *bytes, long size) { /* vectors.md, "Results" */
    fprintf(file, "%ld:%ld %s ", set, n, part);
    for (long i = 0; i < size; i++) fprintf(file, "%02x", ((const unsigned char *)bytes)[i]);
    fputc('\n', file);
}
static double flush(double v) { return fabs(v) < 0x1p-126 ? 0 * v : v; }
static long packed(long codes, int bits) { /* bytes of so many codes, in whole groups */
    long group = 8 / (bits & -bits);
    return (codes + group - 1) / group * group * bits / 8;
}
static double recorded(long part, const codec *coarse, const codec *fine, long k0, long k, long l, long i, long j, long rows,
                       long columns) { /* numerics.md, "Scale records": the scale of two levels for element j of row i, K last */
    long size = coarse->bits / 8 + packed(k0 / k, fine->bits), width = (columns + k0 - 1) / k0 * size, b = j / k0 * size;
    long bit = j % k0 / k * fine->bits, in = b + coarse->bits / 8 + bit / 8;
    uint32_t word = 0, code;
    for (int n = 0; n < coarse->bits / 8; n++) word |= (uint32_t)held[part + at(l, i, b + n, rows, width)] << 8 * n;
    code = held[part + at(l, i, in, rows, width)];
    if (bit % 8 + fine->bits > 8) code |= (uint32_t)held[part + at(l, i, in + 1, rows, width)] << 8;
    return (float)(value(coarse, word) * value(fine, code >> bit % 8 & ((1u << fine->bits) - 1)));
}
static float stepped(double v, char precision) { /* numerics.md, section 4: the result of a step in FP32, then FP16 or BF16 */
    float f = (float)v;
    int e, digits = precision == 'b' ? 8 : 11, least = precision == 'b' ? -133 : -24;
    if (!precision || !isfinite(f) || f == 0) return f;
    frexp(f, &e);
    e = e - digits < least ? least : e - digits;
    f = (float)ldexp(rint(ldexp(f, -e)), e); /* rint: ties to even */
    return precision == 'f' && fabs(f) > 65504 ? copysignf(INFINITY, f) : f;
}
static uint32_t nearest(const codec *c, double y) { /* numerics.md, section 2: ties to the even code, saturating, -0 kept */
    int magnitudes = *c->kind == 'f';
    uint32_t best = 0, sign = magnitudes && signbit(y) ? 1u << (c->bits - 1) : 0;
    for (uint32_t i = 1; i < 1u << (c->bits - magnitudes); i++) {
        double d = fabs(value(c, i) - (sign ? -y : y)), least = fabs(value(c, best) - (sign ? -y : y));
        if (d < least || (d == least && i % 2 == 0)) best = i;
    }
    return best | sign;
}
static int exponent(double v) { /* floor(log2 v), at most 126 */
    int n;
    return frexp(v, &n), n - 1 < 126 ? n - 1 : 126;
}
/* numerics.md, section 5.6: of a block of n <= 32 numbers with this amax, by weights w if there are any, the best of 3 powers of two. */
static int searched(const codec *q, const double *x, const double *w, int n, double amax, int plain) {
    int best = plain, tried[3] = {plain, plain > -127 ? plain - 1 : plain, plain < 127 ? plain + 1 : plain}, size = 1;
    float least = INFINITY, t[32];
    double heaviest = 0, unit = ldexp(1, -exponent(amax));
    for (int i = 0; w && i < n; i++) heaviest = fmax(heaviest, w[i]);
    while (size < n) size *= 2;
    for (int c = 0; c < 3; c++) {
        for (int i = 0; i < size; i++) {
            double y = i < n ? x[i] * unit : 0, v = i < n ? value(q, nearest(q, ldexp(x[i], -tried[c]))) * ldexp(unit, tried[c]) : 0;
            float d = (float)((fabs(y) < 0x1p-20 ? 0 : y) - (fabs(v) < 0x1p-20 ? 0 : v)), weight = 1;
            if (w) weight = i < n && heaviest > 0 ? (float)ldexp(w[i], -exponent(heaviest)) : 0;
            t[i] = (float)((double)(float)((double)d * d) * (weight < 0x1p-40f ? 0 : weight));
        }
        for (int half = size / 2; half; half /= 2)
            for (int i = 0; i < half; i++) t[i] = (float)((double)t[i] + t[i + half]);
        if (t[0] < least) least = t[0], best = tried[c];
    }
    return best;
}
/* numerics.md, section 5.5: the first word of Threefry-2x32-20. */
static uint32_t threefry(uint64_t key, uint64_t counter) {
    static const int turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    uint32_t k[3] = {(uint32_t)key, (uint32_t)(key >> 32)}, a = (uint32_t)counter, b = (uint32_t)(counter >> 32);
    k[2] = k[0] ^ k[1] ^ 0x1BD11BDA;
    a += k[0], b += k[1];
    for (int i = 0; i < 20; i++) {
        a += b, b = (b << turns[i % 8] | b >> (32 - turns[i % 8])) ^ a;
        if (i % 4 == 3) a += k[(i / 4 + 1) % 3], b += k[(i / 4 + 2) % 3] + i / 4 + 1;
    }
    return a;
}
static float cleared(double v) { /* flush, after one rounding; never -0 */
    float f = (float)v;
    return fabs(f) < 0x1p-126 ? 0 : f;
}
static void rotated_back(float *y, long columns, long n, uint64_t seed) { /* numerics.md, section 5.7: whole blocks of a row */
    float factor = (float)(1 / sqrt((double)n));
    for (float *end = y + columns / n * n; y < end; y += n) {
        for (long i = 0; i < n; i++) y[i] = cleared(y[i]);
        for (long h = 1; h < n; h *= 2)
            for (long i = 0; i < n; i++)
                if (i / h % 2 == 0) {
                    double a = y[i], b = y[i + h];
                    y[i] = cleared(a + b), y[i + h] = cleared(a - b);
                }
        for (long i = 0; i < n; i++) y[i] = cleared((threefry(seed, i) >> 31 ? -1 : 1) * (double)y[i] * factor);
    }
}

int main(int argc, char **argv) {
    char path[4096], e[16], s[16], offset[20], rule[16], dtype[16], rounding[16], c0[16], order[16], convention[16], other[16] = "-1";
    char steps[16] = "fp32";
    long set, k0 = -1, coded_bias = 0, weights = -1, rotation = 0, factor_bits = 0x3F800000, index = -1, groups = 0;
    unsigned long long seed = 0;
    long size, cases, m, k, lead, rows, columns, in, given, data, scale, zero, global, out, casts = 0, wrong = 0;
    snprintf(path, sizeof path, "%s/vectors.bin", argc > 1 ? argv[1] : ".");
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) || !(held = malloc(size = ftell(file)))) return perror(path), 2;
    rewind(file);
    if (fread(held, 1, size, file) != (size_t)size) return perror(path), 2;
    snprintf(path, sizeof path, "%s/index.txt", argc > 1 ? argv[1] : ".");
    if (!(file = fopen(path, "r")) || fscanf(file, "%*s %ld %ld %ld", &set, &count, &cases) != 3 || count > 64)
        return perror(path), 2;
    for (codec *c = codecs; c < codecs + count; c++)
        if (fscanf(file, "%15s %15s %d %ld %ld", c->name, c->kind, &c->bits, &c->first, &c->bias) != 5 ||
            fscanf(file, "%ld %ld", &c->nan, &c->inf) != 2)
            return fprintf(stderr, "a codec cannot be read\n"), 2;
    FILE *results = argc > 2 ? fopen(argv[2], "w") : NULL;
    if (argc > 2 && (!results || fprintf(results, "breccia-results 1 vectors.c\n") < 0)) return perror(argv[2]), 2;
    for (long n = 0; n < cases; n++) {
        int read = fscanf(file, "%*d %*s %*s %15s %15s %19s %15s %ld %ld %ld", e, s, offset, rule, &m, &k, &axis);
        read += fscanf(file, "%ld %ld %ld %15s %15s %*s", &lead, &rows, &columns, dtype, rounding);
        read += fscanf(file, "%ld %ld %ld %ld %ld %ld %ld", &in, &given, &data, &scale, &zero, &global, &out);
        if (set > 2) read += fscanf(file, "%15s %ld %ld %15s %15s", c0, &k0, &coded_bias, order, convention) - 5;
        if (set > 3) read += fscanf(file, "%15s", other) - 1;
        if (set > 4) read += fscanf(file, "%ld", &weights) - 1;
        if (set > 5) read += fscanf(file, "%ld %llu", &rotation, &seed) - 2;
        if (set > 6) read += fscanf(file, "%ld %15s %ld %ld", &factor_bits, steps, &index, &groups) - 4;
        if (read != 19)
            return fprintf(stderr, "case %ld cannot be read\n", n), 2;
        const codec *q = named(e), *sc = named(s), *x = named(dtype[5] == '3' ? "F32" : dtype[0] == 'f' ? "F16" : "BF16");
        const codec *f32 = named("F32"), *coarse = k0 > 0 ? named(c0) : NULL, *alternative = *other == '-' ? NULL : named(other);
        long bad = 0, width = packed(columns, q->bits);
        double qmax = 6 * 448, g = global < 0 ? 1 : value(f32, item(global, 0, 32)); /* NVFP4 alone has another convention */
        double tensor = g, factor = value(f32, (uint32_t)factor_bits);
        char precision = steps[2] == '3' ? 0 : *steps; /* "fp32", "fp16" or "bf16" */
        if (set > 2 && global >= 0 && *convention != 'm') g = *convention == 'a' ? (float)(g / qmax) : (float)(1 / g);
        int first = set > 2 && *order == 's', search = !strcmp(rule, "mse");
        int cast = *sc->kind == 'p' && (search || !strcmp(rule, "rceil")) && *rounding == 'n' && given < 0 && !rotation;
        long every_element = lead * rows * columns, blocks = m && k ? lead * ((rows + m - 1) / m) * ((columns + k - 1) / k) : 1;
        float *row = malloc(4 * (size_t)columns + 4); /* what a row decodes to */
        uint32_t *decoded = malloc(4 * (size_t)every_element);
        unsigned char *codes = malloc((size_t)every_element), *scales = malloc((size_t)blocks);
        for (long t = 0; t < every_element; t++) {
            long l = t / columns / rows, i = t / columns % rows, j = t % columns, b = j * q->bits / 8, left = j * q->bits % 8;
            long block = groups ? at(l, i, item(index, j, 32), rows, groups) : m ? at(l, i / m, k ? j / k : 0, (rows + m - 1) / m, k ? (columns + k - 1) / k : 1) : 0;
            uint32_t word = held[data + at(l, i, b, rows, width)], want, bits;
            if (left + q->bits > 8) word |= held[data + at(l, i, b + 1, rows, width)] << 8;
            uint32_t code = word >> left & ((1u << q->bits) - 1), stored = coarse ? 0 : item(scale, block, sc->bits);
            double z = *offset == 'z' ? item(zero, block, 8) : *offset == 'f' ? value(sc, item(zero, block, sc->bits)) : 0;
            int negative = alternative && stored >> (sc->bits - 1); /* the sign of a scale says which codec the block has */
            const codec *el = negative ? alternative : q;
            if (negative) stored &= (1u << (sc->bits - 1)) - 1;
            double by = coarse ? recorded(scale, coarse, sc, k0, k, l, i, j, rows, columns) : value(sc, stored);
            float v = stepped(stepped(value(el, code) - z, precision) * (first ? (float)(by * g) : by), precision);
            if (global >= 0 && !first) v = stepped(set > 2 && *convention == 'd' ? v / tensor : v * g, precision);
            if (factor != 1) v = stepped(v * factor, precision);
            if (*offset == 'b') {
                double b0 = coded_bias ? recorded(zero, coarse, sc, k0, k, l, i, j, rows, columns)
                                       : value(sc, item(zero, block, sc->bits));
                v = stepped(flush(v) + flush(b0) + 0.0, precision); /* +0 where both are -0 */
            }
            row[j] = v;
            if (rotation && j == columns - 1) rotated_back(row, columns, rotation, seed);
            for (long o = 0; j == columns - 1 && o < columns; o++) {
                memcpy(&bits, row + o, 4);
                want = item(out, at(l, i, o, rows, columns), 32);
                decoded[at(l, i, o, rows, columns)] = bits;
                bad += !(bits == want || (isnan(row[o]) && (want & 0x7FFFFFFF) > 0x7F800000));
            }
            if (!cast) continue;
            double amax = 0, largest = 0, y = 0, every[32], heavy[32]; /* the block that element j lies in */
            int length = 0;
            for (long o = j / k * k; o < columns && o < j / k * k + k; o++) {
                double one = flush(value(x, item(in, at(l, i, o, rows, columns), x->bits)));
                heavy[length] = weights < 0 ? 1 : flush(value(f32, item(weights, o, 32)));
                every[length++] = one;
                amax = isfinite(amax) && !(fabs(one) <= amax) ? fabs(one) : amax;
                y = o == j ? one : y;
            }
            for (uint32_t c = 0; c < 1u << q->bits; c++) largest = isfinite(value(q, c)) ? fmax(largest, value(q, c)) : largest;
            int power = -127;
            while (power < 127 && amax > ldexp(largest, power)) power++;
            if (search && isfinite(amax) && amax > 0) power = searched(q, every, weights < 0 ? NULL : heavy, length, amax, power);
            uint32_t byte = isfinite(amax) ? (uint32_t)(power + 127) : 255;
            uint32_t written = isfinite(amax) ? nearest(q, ldexp(y, -power)) : 0;
            codes[at(l, i, j, rows, columns)] = (unsigned char)written, scales[block] = (unsigned char)byte;
            bad += byte != stored || code != written;
        }
        if (results && cast) write_part(results, set, n, "codes", codes, every_element);
        if (results && cast) write_part(results, set, n, "scale", scales, blocks);
        if (results) write_part(results, set, n, "dequantized", decoded, 4 * every_element);
        if (bad) printf("case %ld: %s with %s, %ld differences\n", n, e, s, bad);
        free(row), free(decoded), free(codes), free(scales);
        casts += cast;
        wrong += bad;
    }
    if (results && fclose(results)) return perror(argv[2]), 2;
    printf("%ld cases, %ld cast, %ld differences\n", cases, casts, wrong);
    return wrong != 0;
}
