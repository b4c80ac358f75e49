"""Who may import whom, read from the sources and tried in fresh interpreters.

Rules kept here
- `weightledger.registry` and `weightledger.migrations` import neither Ray nor `weightledger.updater`, not even
  inside a function: a registry is read where no cluster is.
- `weightledger.updater` knows of the registry what `DOORS` names: no table, no connection, no file.
- A kind of database, of locks or of store is known where a registry's parts are chosen, and nowhere else.
- No import is relative or by a bare folder name: both would load a module twice, under two names.
- No two modules import each other while they are being loaded.
- `import weightledger.registry` loads neither torch nor Ray, and no database before `Registry` is asked for.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("registry", "updater", "migrations")


def sources() -> dict[str, str]:
    """Every module of the three packages, by the name that users import."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("weightledger", *(parts[:-1] if parts[-1] == "__init__" else parts)))
            found[name] = path.read_text(encoding="utf-8")
    return found


def statements(body: list[ast.stmt], *, loading_only: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements in `body`; with `loading_only`, those that run while the module is loaded."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif loading_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif loading_only and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from statements(node.orelse, loading_only=True)
        else:
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                inner = getattr(node, name, [])
                for item in inner:
                    blocks = item.body if isinstance(item, ast.ExceptHandler | ast.match_case) else [item]
                    yield from statements(blocks, loading_only=loading_only)


def imported(source: str, modules: Mapping[str, str], *, loading_only: bool) -> set[str]:
    """Names of the modules that `source` imports; a relative import keeps its leading dots."""
    names: set[str] = set()
    for node in statements(ast.parse(source).body, loading_only=loading_only):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
            continue
        base = "." * node.level + (node.module or "")
        for alias in node.names:
            # `from package import module` does not need what the package's own __init__ defines.
            inner = f"{base}.{alias.name}"
            names.add(inner if inner in modules else base)
    return names


def belongs(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def forbidden(modules: Mapping[str, str], importers: str, targets: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, source in modules.items()
        if belongs(module, importers)
        for name in sorted(imported(source, modules, loading_only=False))
        if any(belongs(name, target) for target in targets)
    ]


def cycle(modules: Mapping[str, str]) -> list[str]:
    """A cycle among the imports made while loading, or nothing."""
    graph = {
        module: imported(source, modules, loading_only=True) & modules.keys()
        for module, source in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def fresh(program: str) -> str:
    """What a new interpreter prints for `program`."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["weightledger.registry", "weightledger.migrations"])
def test_the_registry_and_its_migrations_import_neither_ray_nor_the_updater(package: str) -> None:
    assert forbidden(sources(), package, ("ray", "weightledger.updater")) == []


DOORS = {
    "weightledger.registry",
    "weightledger.registry.arguments",
    "weightledger.registry.errors",
    "weightledger.registry.logs",
    "weightledger.registry.origins",
    "weightledger.registry.records",
    "weightledger.registry.sync",
    "weightledger.registry.weights",
}


def test_the_updater_knows_of_the_registry_only_its_doors() -> None:
    modules = sources()
    wrong = [
        f"{module} imports {name}"
        for module, source in modules.items()
        if belongs(module, "weightledger.updater")
        for name in sorted(imported(source, modules, loading_only=False))
        if belongs(name, "weightledger.registry") and name not in DOORS
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["weightledger.updater"])
def test_the_updater_has_no_database_and_opens_no_file(package: str) -> None:
    modules = sources()
    assert forbidden(modules, package, ("sqlalchemy", "sqlite3", "alembic")) == []
    opened = [
        f"{module}:{node.lineno}"
        for module, source in modules.items()
        if belongs(module, package)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("open", "os.open", "Path.open", "io.open")
    ]
    assert opened == []


KINDS = {
    "weightledger.registry.database.sqlite",
    "weightledger.registry.locks.folder",
    "weightledger.registry.store.cache",
    "weightledger.registry.store.local",
    "weightledger.registry.store.objects",
}


def test_kinds_of_databases_locks_and_stores_are_chosen_in_one_place() -> None:
    modules = sources()
    wrong = [
        f"{module} imports {name}"
        for module, source in modules.items()
        if module
        not in KINDS
        | {
            "weightledger.registry.places",
            "weightledger.registry.store.opening",
            "weightledger.migrations.env",
        }
        for name in sorted(imported(source, modules, loading_only=False) & KINDS)
    ]
    assert wrong == [] and modules.keys() >= KINDS


def test_the_migrations_state_their_own_tables_and_import_nothing_of_the_registry() -> None:
    assert forbidden(sources(), "weightledger.migrations.versions", ("weightledger.registry",)) == []


def test_no_module_imports_by_a_bare_folder_name_or_relatively() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, source in sources().items()
        for name in sorted(imported(source, {}, loading_only=False))
        if name.startswith(".") or any(belongs(name, folder) for folder in FOLDERS)
    ]
    assert wrong == []


def test_no_two_modules_import_each_other_while_they_are_loaded() -> None:
    assert cycle(sources()) == []


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import weightledger.registry", {"sqlalchemy", "numpy", "torch", "tensordict", "ray"}),
        ("from weightledger.registry import Registry", {"alembic", "numpy", "torch", "tensordict", "ray"}),
    ],
)
def test_importing_the_registry_stays_light(statement: str, heavy: set[str]) -> None:
    loaded = fresh(f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})")
    assert set(loaded.split()) & heavy == set()


def test_the_registry_offers_what_it_names_and_nothing_else() -> None:
    program = """
import weightledger.registry as registry
names = {}
exec("from weightledger.registry import *", names)
print(sorted(names.keys() - {"__builtins__"}) == registry.__all__, hasattr(registry, "Other"))
"""
    assert fresh(program) == "True False"


def test_the_registry_works_where_ray_and_the_updater_cannot_be_imported(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["ray"] = sys.modules["weightledger.updater"] = None  # an import of either is now an error
import torch
from weightledger.registry import Registry
with Registry.open({str(tmp_path / "runs")!r}) as registry:
    registry.publish({{"w": torch.ones(2)}})
    registry.publish({{"w": torch.zeros(2)}})
    registry.rollback()
    print(registry.load()["w"].tolist())
"""
    assert fresh(program) == "[1.0, 1.0]"


SYNTHETIC = {
    "weightledger.registry": "from weightledger.registry.core import Registry",
    "weightledger.registry.core": "from weightledger.registry import files\nimport torch",
    "weightledger.registry.files": "",
}


def test_the_reading_of_imports_finds_a_cycle_at_loading_time_only() -> None:
    late = "def f():\n    from weightledger.registry.core import Registry"
    typed = "if TYPE_CHECKING:\n    from weightledger.registry.core import Registry"
    now = "try:\n    from weightledger.registry.core import Registry\nexcept ImportError:\n    raise"
    assert cycle(SYNTHETIC | {"weightledger.registry.files": late}) == []
    assert cycle(SYNTHETIC | {"weightledger.registry.files": typed}) == []
    assert "weightledger.registry.files" in cycle(SYNTHETIC | {"weightledger.registry.files": now})


def test_the_reading_of_imports_finds_what_is_hidden_in_a_function() -> None:
    hidden = "class A:\n    def f(self):\n        with x:\n            import ray.util.metrics"
    modules = SYNTHETIC | {"weightledger.registry.files": hidden}
    assert forbidden(modules, "weightledger.registry", ("ray",)) == [
        "weightledger.registry.files imports ray.util.metrics"
    ]
    assert forbidden(modules, "weightledger.registry", ("raylib",)) == []
