"""What every test runs under: one torch thread, no network, none of the caller's options."""

import os
import signal

# Before torch, tokenizers or a hub client is imported; a process that a test starts inherits them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Hundreds of processes import the package: without its bytecode on disk, each of them compiles it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for _name in [name for name in os.environ if name.startswith("STRETTO_")]:
    del os.environ[_name]

# Started in the background of a script, everything ignores Ctrl-C, and so would the commands that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings  # noqa: E402

# The same examples in every run, so that CI fails for what changed; HYPOTHESIS_PROFILE=explore searches anew.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
