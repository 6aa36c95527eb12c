"""Builds the sdist, the wheel from it, installs the wheel in an environment of its own and uses it there.

Run by `make wheel`. What only an installed wheel can show: that all three packages are in it, that type checkers find
their types, that its declared dependencies are enough, and that a user's own `planner.py` and `layouts.py` beside the
script do not get in the way.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("vescale_jax", "vescale_layouts", "vescale_planner")

WITHOUT_JAX = """
import sys
import vescale_planner
assert "jax" not in sys.modules, "import vescale_planner loads jax"
from vescale_planner import Rows, TensorSpec, plan_group
plan = plan_group([TensorSpec("kernel", (12, 10), Rows(3)), TensorSpec("bias", (10,))], num_shards=4)
plan.check()
assert set(plan.slots) == {"kernel", "bias"}
assert plan.shard_size * 4 >= 130
assert "jax" not in sys.modules, "planning loads jax"
print(plan)
"""

BESIDE_OWN_FILES = """
import layouts, planner
assert layouts.MINE and planner.MINE, "the user's own files are not the ones found"
import vescale_jax, vescale_layouts, vescale_planner
for package in (vescale_jax, vescale_layouts, vescale_planner):
    assert "site-packages" in package.__file__, package.__file__
print("vescale_jax", *(name for name in dir(vescale_jax) if not name.startswith("_")))
"""


def run(*command: str | Path, folder: Path) -> None:
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=folder, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"This command ended with status {done.returncode}: {' '.join(map(str, command))}")


def build_wheel(out: Path) -> Path:
    """The wheel that `build` makes from the sdist that it made from this checkout."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, folder=out)
    (wheel,) = out.glob("*.whl")
    (_,) = out.glob("*.tar.gz")
    return wheel


def check_contents(wheel: Path) -> None:
    """All modules of the checkout are in the wheel, with the files that tell type checkers of the types."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = (ROOT / "vescale_jax", ROOT / "layouts" / "vescale_layouts", ROOT / "planner" / "vescale_planner")
    wanted = {
        file.relative_to(source.parent).as_posix()
        for source in sources
        for file in (*source.rglob("*.py"), source / "py.typed")
    }
    if wanted - inside:
        raise SystemExit(f"Not in {wheel.name}: {sorted(wanted - inside)}")
    packed = {name.split("/")[0] for name in inside if ".dist-info/" not in name}
    if packed != set(PACKAGES):
        raise SystemExit(f"{wheel.name} holds {sorted(packed)}; wanted {sorted(PACKAGES)} and nothing else.")


def use_installed(wheel: Path, folder: Path) -> None:
    """Installs the wheel with its dependencies and runs both scripts in a folder with clashing file names."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, folder=folder)

    user = folder / "user"
    user.mkdir()
    for name in ("planner.py", "layouts.py"):
        (user / name).write_text("MINE = True\n")
    for name, code in {"without_jax.py": WITHOUT_JAX, "beside_own_files.py": BESIDE_OWN_FILES}.items():
        (user / name).write_text(code)
        run(python, name, folder=user)


def main() -> None:
    """Runs all steps in a temporary folder; any failure ends with a non-zero exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = folder / "built"
        built.mkdir()
        wheel = build_wheel(built)
        check_contents(wheel)
        use_installed(wheel, folder)
        print(f"{wheel.name}: built from the sdist, installed, used.")


if __name__ == "__main__":
    main()
