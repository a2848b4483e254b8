"""Goes away: import from the modules below."""
from checkpoints import assert_equal, difference, load_checkpoint  # noqa: F401
from functions import fork, load_script, train  # noqa: F401
from processes import GPUS, Job, Result, clean_environment, free_port, run, start  # noqa: F401
from scripts import ROOT, SCRIPTS, script_path  # noqa: F401
