"""`tq-cache cache`: folders with saved caches."""

import typer

from .arguments import AsJSON, Folder
from .console import progress, show, user_errors

app = typer.Typer(help="Saved caches: what one holds, and whether it is whole.", no_args_is_help=True)


@app.command("info")
def cache_info(folder: Folder, json_: AsJSON = False) -> None:
    """What a saved cache holds; its tensors are not read."""
    with user_errors():
        from tq_cache.tools import saved

        said = saved.summary(folder)
        show(json_, lambda: said, lambda: saved.table(said, f"saved cache {folder}"))


@app.command("verify")
def cache_verify(folder: Folder, json_: AsJSON = False) -> None:
    """Read all of a saved cache and compare checksums; exit code 2 where it is damaged."""
    with user_errors():
        from tq_cache.tools import saved

        count = saved.verify(folder, progress)
        said = saved.summary(folder) | {"tensors": count, "whole": True}
        line = f"{folder}: {count} tensors, {said['bytes']:,} bytes, all as they were saved"
        show(json_, lambda: said, lambda: line)
