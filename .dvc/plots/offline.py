"""Make the pages of `dvc plots` draw without a network, in this clone: `python .dvc/plots/offline.py`.

Writes offline.html, which is page.html with Vega's scripts in it instead of links to them, and tells DVC to use it.
"""

import subprocess
import sys
from pathlib import Path

import vl_convert

FOLDER = Path(__file__).parent
VEGA_LITE = "5.20"  # the charts of DVC are of version 5


def main() -> None:
    """Write the template and set it in .dvc/config.local."""
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    scripts = vl_convert.javascript_bundle(vl_version=VEGA_LITE)
    page = page.replace("{scripts}", f"<script>(() => {{{scripts}}})()</script>")
    (FOLDER / "offline.html").write_text(page, encoding="utf-8")
    command = [sys.executable, "-m", "dvc", "config", "--local", "plots.html_template", "plots/offline.html"]
    subprocess.run(command, cwd=FOLDER, check=True)
    print(f"dvc plots draws with {FOLDER / 'offline.html'}")


if __name__ == "__main__":
    main()
