"""`python -m tq_cache`: the command line."""

from .tools.cli import app

app(prog_name="tq-cache")
