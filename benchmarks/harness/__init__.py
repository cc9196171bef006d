"""What the benchmarks share. A subject, `bench_*.py`, declares its arms and its tables; the harness does the rest.

- `commands`: the command line of a subject, processes of their own, and choices of recipes and rivals.
- `timing`: seconds of calls on the host. `device`: seconds on a GPU, with checks of products.
- `results`: provenance, the files of benchmarks/results, and joining them.
- `tables`: results as cells, and tables of goals. `blocks` and `plots`: the pages of docs/.

No module here imports a subject. `breccia` is imported inside functions, since in some processes another version shadows it.
Subjects import from here what all machines have: `device` needs torch.
"""

from harness.commands import *  # noqa: F403
from harness.results import *  # noqa: F403
from harness.tables import *  # noqa: F403
from harness.timing import *  # noqa: F403
