"""Help, completion and the version, as a user's shell asks for them: at once, without torch or transformers."""

import os
import subprocess
import sys

import tq_cache
from tq_cache import FORMATS
from tq_cli import measure

ASK = """
import os, sys
from tq_cli.app import app
def ask(*arguments):
    try:
        app(list(arguments), prog_name="tq-cache")
    except SystemExit as end:
        assert not end.code, arguments
ask("--version")
ask("--help")
for command in ("demo", "generate", "chat", "info", "plan", "eval", "lm-eval", "cache"):
    ask(command, "--help")
os.environ |= {"_TQ_CACHE_COMPLETE": "complete_bash", "COMP_WORDS": "tq-cache pl", "COMP_CWORD": "1"}
print("completed:")
ask()
print("imported:", sorted({"torch", "transformers", "tq_cache", "numpy"} & set(sys.modules)))
"""


def test_help_and_completion_import_nothing_slow():
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"tq-cache {tq_cache.__version__}\n")
    for command in ("demo", "generate", "chat", "info", "plan", "eval", "lm-eval", "cache"):
        assert f" {command} " in done.stdout
    completed, imported = done.stdout.split("completed:\n")[1].split("imported: ")
    assert completed.split() == ["plan"] and imported.strip() == "[]"


def test_the_module_is_the_command_and_the_package_stays_light():
    code = (
        "import sys, tq_cache; "
        "assert not {'typer', 'matplotlib', 'tq_cache.tools', 'tq_cli', 'tq_kernels'} & set(sys.modules); "
        "import runpy; sys.argv = ['tq-cache', '--help']; runpy.run_module('tq_cache', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and " generate " in done.stdout, done.stderr


def test_help_names_the_formats_of_rotary_keys():
    """It is written without importing them."""
    (option,) = measure.plan.__annotations__["rotary"].__metadata__
    assert all(name in option.help for name in FORMATS["rotary"])
