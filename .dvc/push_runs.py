"""Send what every run here gave to the default remote: `python .dvc/push_runs.py`.

`dvc push --run-cache` sends the records of the runs, and of their results only those that the current `dvc.lock` names
and that are not kept in Git. `dvc repro --pull` needs them all, metrics and plots as well, to restore a run elsewhere.
"""

import sys

from dvc.repo import Repo


def main() -> None:
    """Push the records, then all that they name."""
    with Repo() as repo, repo.lock:
        runs = repo.stage_cache.push(None)
        failed = 0
        for store, objects in repo.stage_cache.get_used_objs(runs).items():
            failed += len(repo.cloud.push(objects, odb=store).failed)
    print(f"{len(runs)} runs pushed")
    if failed:
        sys.exit(f"ERROR: {failed} files failed to upload")


if __name__ == "__main__":
    main()
