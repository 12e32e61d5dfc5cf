"""`forespeak pull` and `forespeak models`."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from server.models import list_models, pull
from server.settings import Settings


def pull_model(settings: Settings) -> int:
    """Fetch a model with a progress bar and print where it is."""
    from server.compose import cache_root

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"pulling {settings.model}", total=None)
        paths = pull(
            settings.model, cache_root(settings), lambda done, total: progress.update(task, completed=done, total=total)
        )
    print(paths.weights)
    return 0


def list_all(settings: Settings) -> int:
    """Print a table of what is in the cache."""
    from server.compose import cache_root

    table = Table("name", "size", "path")
    for entry in list_models(cache_root(settings)):
        table.add_row(entry.name, f"{entry.size / 2**20:.1f} MiB", str(entry.path))
    Console().print(table)
    return 0
