"""`python -m tq_cache`: the command line."""

from tq_cli.app import app

app(prog_name="tq-cache")
