"""The list of modules that may be compiled, and what must not be on it. `make compiled` builds them and runs tests on them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("hatchling")


@pytest.fixture
def tool() -> ModuleType:
    """tools/compile.py, which belongs to no package."""
    path = Path(__file__).parents[2] / "tools" / "compile.py"
    spec = importlib.util.spec_from_file_location("stele_tools_compile", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_listed_modules_exist_and_may_be_compiled(tool: ModuleType) -> None:
    found = tool.modules()
    assert "stele/raft/core.py" in found and len(found) == len(set(found)) > 60
    assert not any(path.endswith("__init__.py") for path in found)


@pytest.mark.parametrize(
    "body",
    [
        "try:\n        await x\n    finally:\n        y()",
        "try:\n        y()\n    finally:\n        await x",
        "async with x:\n        y()",
        "with x:\n        y(await z)",
        "async for y in x:\n        pass",
        "try:\n        await x\n    except* y:\n        pass",
        "try:\n        z = [y async for y in x]\n    finally:\n        pass",
    ],
)
def test_a_coroutine_that_waits_within_a_block_is_found(tool: ModuleType, body: str) -> None:
    assert tool.waits_within(f"async def f():\n    {body}\n") == [2]


def test_others_are_not(tool: ModuleType) -> None:
    source = (
        "async def f():\n    await x\n    try:\n        y()\n    finally:\n        z()\n    return await x\n"
    )
    assert tool.waits_within(source) == []


def test_a_list_that_names_nothing_is_refused(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.stele.compiled]\nmodules = ["stele/no.py"]\n')
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"stele/no\.py names no module"):
        tool.modules()


def test_a_module_that_waits_within_a_block_is_refused(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node" / "stele").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.stele.compiled]\nmodules = ["stele/yes.py"]\n')
    (tmp_path / "node" / "stele" / "yes.py").write_text("async def f():\n    async with x:\n        pass\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"yes\.py:2 waits within a block"):
        tool.modules()


def test_a_directory_of_somebody_else_is_left_alone(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="this program did not make it"):
        list(tool.compile_into(tmp_path))
    assert (tmp_path / "file").exists()


def test_the_images_have_what_their_build_runs() -> None:
    """Every build of a wheel runs the hook, even where it has nothing to do."""
    root = Path(__file__).parents[2]
    assert "COPY tools/compile.py tools/compile.py\n" in (root / "Dockerfile").read_text()
    assert "!tools/compile.py\n" in (root / ".dockerignore").read_text()
