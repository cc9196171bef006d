/* Independent multiply-adds of FP32 numbers in registers: the arm of that name in cpu_products.py. */

#if defined(__AVX512F__)
enum { BYTES = 64 };
#elif defined(__AVX2__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
enum { CHAINS = 12 }; /* independent sums: an instruction takes 4 cycles, and a processor begins two at a time */
#define EACH(i) _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++)
typedef float vector __attribute__((vector_size(BYTES)));

float multiply_adds(long count, int threads)
{
    const long each = count / (BYTES / 4) / CHAINS / threads;
    float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        vector sums[CHAINS], x = {0};
        x += 0.999f;
        EACH(i) sums[i] = x * (float)i;
        for (long n = 0; n < each; n++)
            EACH(i) sums[i] = sums[i] * x + x;
        EACH(i) total += sums[i][0];
    }
    return total;
}
