"""`python -m tq_cache`: the command line."""

from .cli import app

app(prog_name="tq-cache")
