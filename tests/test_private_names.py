"""Private names: no class uses those of another one of ours, and those of other projects stand in one list.

When another project renames one of its own, the contract test here says which, and what it was used for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FOLDERS = ("registry", "updater", "migrations")

HOOKS = {"_get_server_weights", "_maybe_map_weights", "_sync_weights_with_worker", "_skip_update"}
"""The names of TorchRL's updater, which may be overridden: an update calls them."""

OWN = {"_ask", "_probe", "_push_for", "_copy_of", "_keep_bytes_of"}
"""What an updater gives to its own cycle, questions and probes, and to nobody who uses it."""

PUBLIC = {"_replace", "_fields", "_asdict", "_getframe", "_metadata"}
"""Names that are documented although they begin like private ones: of named tuples, `sys` and PyTorch's state dicts."""


class Foreign(NamedTuple):
    """A private name of another project."""

    project: str
    owner: str
    """Importable path of the module or class that has it."""
    name: str
    why: str


FOREIGN = [
    Foreign("ray", "ray._private.state", "actors", "which incarnation an actor is, without asking busy ones"),
    Foreign("ray", "ray._private.worker", "global_worker", "whether a call comes from inside of an actor"),
    Foreign("ray", "ray.actor.ActorHandle", "_actor_id", "what tells an actor from all others"),
    Foreign(
        "ray", "ray.rllib.env.env_runner_group.EnvRunnerGroup", "_worker_manager", "the env runners' actors"
    ),
    Foreign(
        "ray", "ray.rllib.core.learner.learner_group.LearnerGroup", "_worker_manager", "the learners' actors"
    ),
    Foreign(
        "ray",
        "ray.rllib.core.learner.learner.Learner",
        "_named_optimizers",
        "optimizers go back with a policy",
    ),
    Foreign(
        "ray",
        "ray.rllib.core.learner.learner.Learner",
        "_optimizer_name_to_module",
        "which module they train",
    ),
    Foreign(
        "ray",
        "ray.rllib.core.learner.learner.Learner",
        "_weights_seq_no",
        "RLlib's numbers go on and never fall",
    ),
    Foreign(
        "ray",
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_weights_seq_no",
        "the number that samples are stamped with",
    ),
    Foreign(
        "torchrl",
        "torchrl.collectors.distributed.RayCollector",
        "_weight_sync_schemes",
        "whose schemes they are",
    ),
    Foreign(
        "torchrl",
        "torchrl.collectors.distributed.RayCollector",
        "_weight_sync_initialized",
        "no endless wait",
    ),
    Foreign(
        "torchrl", "torchrl.collectors.distributed.RayCollector", "_collection_thread", "who asks for frames"
    ),
    Foreign(
        "torchrl", "torchrl.collectors.distributed.RayCollector", "_sync_iterator", "the loop's own updates"
    ),
    Foreign(
        "torchrl", "torchrl.collectors.distributed.RayCollector", "_async_iterator", "the loop's own updates"
    ),
    Foreign("torchrl", "torchrl.collectors.Collector", "_carrier", "the frame that waits to be acted on"),
    Foreign("torchrl", "torchrl.envs.llm.transforms.policy_version.PolicyVersion", "_step", "its stamp"),
    Foreign("torch", "torch.nn.Module", "_parameters", "whether a module is the one that was looked at"),
    Foreign("torch", "torch.nn.Module", "_buffers", "the same"),
    Foreign("torch", "torch.nn.Module", "_modules", "the same"),
    Foreign("torch", "torch.nn.Module", "_state_dict_hooks", "whether its state dict is computed"),
    Foreign("torch", "torch.nn.Module", "_state_dict_pre_hooks", "the same"),
    Foreign("torch", "torch.nn.Module", "_load_state_dict_pre_hooks", "whether loading derives something"),
    Foreign("torch", "torch.nn.Module", "_load_state_dict_post_hooks", "the same"),
    Foreign("torch", "torch", "_foreach_copy_", "many small tensors in one call"),
    Foreign("torch", "torch", "_C", "tensors that a functorch transform wraps have no bytes"),
    Foreign("torch", "torch._C", "_functorch", "the same"),
]


class Use(NamedTuple):
    """Where a private name is used."""

    place: str
    name: str


def own_names(owner: ast.ClassDef) -> set[str]:
    """Return what a class defines or assigns on itself."""
    names = set()
    for node in ast.walk(owner):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def private_uses(source: str, place: str) -> Iterator[Use]:
    """Yield the private attributes that are read off something else than the object's own class."""

    def visit(node: ast.AST, own: set[str]) -> Iterator[Use]:
        for child in ast.iter_child_nodes(node):
            inside = own_names(child) if isinstance(child, ast.ClassDef) else own
            if (
                isinstance(child, ast.Attribute)
                and child.attr.startswith("_")
                and not child.attr.startswith("__")
            ):
                match child.value:
                    case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
                        pass
                    case _ if child.attr not in inside:
                        yield Use(f"{place}:{child.lineno}", child.attr)
            yield from visit(child, inside)

    yield from visit(ast.parse(source), set())


def test_no_class_uses_private_members_of_another_one() -> None:
    foreign = {each.name for each in FOREIGN}
    found = [
        use
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for use in private_uses(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
        if use.name not in HOOKS | OWN | PUBLIC | foreign
    ]
    assert found == []


def test_the_reading_of_private_names_finds_another_classes_and_leaves_the_own() -> None:
    source = """
class A:
    def f(self, other: "A", b):
        self._x = other._x
        return b._y
"""
    assert list(private_uses(source, "a.py")) == [Use("a.py:5", "_y")]


def owner_of(path: str) -> Any:
    """Import a module, or a class of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def has(owner: Any, name: str) -> bool:
    """Tell whether an object has an attribute, or a class gives its objects one."""
    if hasattr(owner, name):
        return True
    classes = owner.__mro__ if inspect.isclass(owner) else ()
    # The whole module's: a class that is decorated has no source of its own.
    sources = [inspect.getsource(inspect.getmodule(each) or each) for each in classes if each is not object]
    return any(f"self.{name} =" in source or f"self.{name}:" in source for source in sources)


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda each: f"{each.owner}.{each.name}")
def test_a_private_name_of_another_project_is_where_it_was(foreign: Foreign) -> None:
    assert has(owner_of(foreign.owner), foreign.name), (
        f"{foreign.project} {version(foreign.project)} has no {foreign.owner}.{foreign.name} any more, which is used "
        f"for this: {foreign.why}"
    )


def test_the_contract_test_would_notice_a_name_that_moved() -> None:
    assert not has(owner_of("ray.actor.ActorHandle"), "_actor_identifier")


@pytest.mark.parametrize("project", ["ray", "torchrl", "tensordict"])
def test_projects_whose_private_names_are_used_have_an_upper_bound(project: str) -> None:
    """A later minor version may rename them: it is tried first."""
    wanted = [Requirement(text) for text in requires("weightledger") or []]
    bounds = [str(each.specifier) for each in wanted if each.name == project]
    assert bounds
    assert all("<" in bound for bound in bounds), bounds
