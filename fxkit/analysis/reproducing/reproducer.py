"""Reproducers: a folder with a script that builds a graph and its inputs again, and runs a check.

The script needs torch and safetensors. The graph is in it as code, weights and inputs are in a
safetensors file with their strides and the memory that they share; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import fx

from fxkit.analysis.reproducing.flat_program import flat_program
from fxkit.analysis.reproducing.module_code import BARE_FUNCTION, PUT_FUNCTION, ModuleWriter
from fxkit.analysis.reproducing.tensor_data import PLAIN_TENSOR_FUNCTION, TENSOR_FUNCTION
from fxkit.ir.printer import format_graph
from fxkit.ir.writing import writing

SCRIPT = "run.py"
DATA = "data.safetensors"
GRAPH = "graph.txt"

Check = Callable[[fx.GraphModule, tuple[Any, ...]], Any]

_RUN = """
print(program(*args))
""".strip()

_CHECK = """
is_bad = bool(bad(program, args))
print("the fault is there" if is_bad else "the fault is gone")
sys.exit(is_bad)
""".strip()


def write_reproducer(
    folder: str | Path,
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    check: Check | str | None = None,
    title: str = "",
) -> Path:
    """Write a folder whose `run.py` builds a graph module with its inputs and checks it.

    Beside `run.py` are `graph.txt`, the graph to read, and `data.safetensors`, parameters, buffers
    and tensor inputs. The script calls the module with one argument for each placeholder; what
    `torch.export` returned takes the leaves of its arguments there, and returns a list.

    Args:
        folder: Where to write; made when it is not there, files of these names are replaced.
        gm: The module; it is not changed.
        args: Its inputs.
        kwargs: Its keyword inputs.
        check: `bad(program, args)`, a function that is written into the script by its source: the
            script then ends with status 1 while it says True. Or statements as text that use
            `program` and `args`. Without it the script runs the program and prints the result.
        title: What is shown at the head of the script.

    Returns:
        The path of `run.py`.

    Raises:
        UnsupportedError: When the graph, an input or the check can't be written, with the node.

    Example:
        >>> import tempfile, torch, fxkit
        >>> from fxkit.analysis.reproducing.reproducer import write_reproducer
        >>> gm = fxkit.symbolic_trace(lambda x: torch.log(x) + 1)
        >>> def bad(gm, args):
        ...     return gm(*args).isnan().any()
        >>> write_reproducer(tempfile.mkdtemp(), gm, (-torch.ones(2),)).name
        'run.py'
    """
    script = Script(title)
    script.add_program(gm, args, kwargs)
    script.set_check(check)
    return script.save(Path(folder))


def code_of(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    check: Check | str | None = None,
    title: str = "",
) -> str:
    """Return the script of `write_reproducer` as text, with the tensors in it; no file is needed.

    Raises:
        UnsupportedError: When something can't be written, with the node.
    """
    script = Script(title)
    script.add_program(gm, args, kwargs)
    script.set_check(check)
    return script.text(None)


class Script:
    """A script under construction.

    Attributes:
        writer: Writes values, functions and modules, and collects what they need.
        statements: What the script does, with `program` and `args`.
    """

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.writer = ModuleWriter()
        self.statements = ""
        self._programs: dict[str, str] = {}
        self._graphs: dict[str, fx.GraphModule] = {}
        self._args = "()"

    def add_program(
        self, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Take in the program and its inputs."""
        flat, values = flat_program(gm, args, kwargs)
        self.add_module(flat, "program")
        names = [n.name for n in flat.graph.nodes if n.op == "placeholder"]
        written = [self.writer.named(v, name) for v, name in zip(values, names, strict=True)]
        self._args = f"({', '.join(written)}{',' if len(written) == 1 else ''})"

    def add_module(self, gm: fx.GraphModule, name: str) -> None:
        """Take in a module that the statements use by this name."""
        self._programs[name] = self.writer.builder(gm, f"build_{name}")
        self._graphs[name] = gm

    def set_check(self, check: Check | str | None) -> None:
        """Say what the script does with `program` and `args`; see `write_reproducer`."""
        if callable(check):
            self.writer.functions.add(check, "bad")
        self.statements = check if isinstance(check, str) else (_CHECK if check else _RUN)

    def save(self, folder: Path) -> Path:
        """Write script, data and graph into a folder; return the script's path.

        Raises:
            UnsupportedError: When the folder can't be written to.
        """
        text = self.text(DATA)
        graphs = [
            f"{name}:\n{format_graph(gm, sources=True)}\n" for name, gm in self._graphs.items()
        ]
        script = folder / SCRIPT
        with writing(folder, "folder"):
            folder.mkdir(parents=True, exist_ok=True)
            self.writer.data.save(folder / DATA)
            (folder / GRAPH).write_text("\n".join(graphs))
            script.write_text(text)
        return script

    def text(self, data_file: str | None) -> str:
        """Return the script; without a file name the tensors are written into it."""
        programs = [*self.writer.inner_builders(), *self._programs.values()]
        is_plain = self.writer.data.layout() == "{}"
        parts = [
            "\n".join(self._head()),
            "\n".join(self._imports(data_file)),
            self._data(data_file),
            PLAIN_TENSOR_FUNCTION if is_plain else TENSOR_FUNCTION,
            PUT_FUNCTION if any(" put(" in program for program in programs) else "",
            BARE_FUNCTION if any(", bare(" in program for program in programs) else "",
            *self.writer.functions.lines,
            *programs,
            "\n".join(self._main()),
        ]
        return "\n\n\n".join(part for part in parts if part) + "\n"

    def _head(self) -> list[str]:
        lines = [self.title] if self.title else []
        for name, gm in self._graphs.items():
            lines.extend(["", f"{name}:", format_graph(gm)])
        shown = [line for text in lines for line in text.splitlines() or [""]]
        return [f"# {line}".rstrip() for line in shown[not self.title :]]

    def _imports(self, data_file: str | None) -> Iterable[str]:
        modules = sorted({"sys", "torch", *self.writer.modules})
        if self.writer.data.layout() != "{}":
            modules = sorted({"functools", *modules})
        yield "from __future__ import annotations"
        yield ""
        if data_file is None and "b64decode" in self.writer.data.literals():
            modules = sorted({"base64", *modules})
        if data_file is not None:
            yield "from pathlib import Path"
        folders = [f"sys.path.insert(0, {folder!r})" for folder in self.writer.folders]
        if folders:
            yield from ("import sys", *folders)
        yield from (f"import {module}" for module in modules if not (folders and module == "sys"))
        if data_file is not None:
            yield "from safetensors.torch import load_file"
        yield "from torch import fx, nn"

    def _data(self, data_file: str | None) -> str:
        data = self.writer.data
        if data_file is None:
            lines = [f"DATA = {data.literals()}"]
        else:
            lines = [
                f'FILE = Path(__file__).with_name("{data_file}")',
                "DATA = {name: block.clone() for name, block in load_file(FILE).items()}",
            ]
        lines.extend(
            f"DATA[{name!r}] = DATA[{name!r}].to({device!r})"
            for name, device in data.devices().items()
        )
        if data.layout() != "{}":
            lines.append("# name: (memory, dtype, size, stride, offset), where not as in DATA")
            lines.append(f"LAYOUT = {data.layout()}")
        return "\n".join(lines)

    def _main(self) -> list[str]:
        body = [f"{name} = build_{name}()" for name in self._programs]
        body.extend([f"args = {self._args}", *self.statements.splitlines()])
        return ['if __name__ == "__main__":', *(f"    {line}" if line else "" for line in body)]
