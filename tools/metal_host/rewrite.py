"""Metal source -> C++ text for the shim: address spaces become types, threadgroup arrays become checked memory."""

import re
from dataclasses import dataclass

from metal_host.errors import MetalHostError

SPACES = {"device": "kDevice", "constant": "kConstant", "threadgroup": "kShared"}
_TYPE = r"(?:metal::)?[A-Za-z_]\w*(?:<[^<>;(){}]*>)?"
_POINTER = re.compile(
    rf"\b(?:(const)\s+)?(device|constant|threadgroup|thread)\s+(?:(const)\s+)?(?!const\b)({_TYPE})\s*(const\s*)?(\*|&)"
)
_ARRAY = re.compile(rf"\bthreadgroup\s+({_TYPE})\s+([A-Za-z_]\w*)\s*((?:\[[^\]]*\])*)\s*;")
_KERNEL = re.compile(r"\[\[kernel\]\]\s+void\s+(\w+)\s*\(([^{;]*)\)\s*\{")
_TEMPLATE = re.compile(r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((\w+)(<.*>)\) .*;$", re.MULTILINE)
_BUFFER = re.compile(r"^(?P<type>.*?)(?P<name>\w+)\s*\[\[buffer\((?P<index>\d+)\)\]\]$", re.DOTALL)
_ATTRIBUTE = re.compile(r"^(?P<type>\w+)\s+(?P<name>\w+)\s*\[\[(?P<attribute>\w+)\]\]$")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PRAGMA = re.compile(r"^\s*#pragma\s+METAL\s+fp\s+contract\s*\(\s*off\s*\)\s*$", re.MULTILINE)

_DIM3 = "metal::uint3{{mh::machine.{0}.x, mh::machine.{0}.y, mh::machine.{0}.z}}"
ATTRIBUTES = {
    "thread_index_in_threadgroup": "uint(mh::machine.current->index)",
    "thread_index_in_simdgroup": "uint(mh::machine.current->lane)",
    "simdgroup_index_in_threadgroup": "uint(mh::machine.current->simd)",
    "simdgroups_per_threadgroup": "uint(mh::machine.threads / mh::kLanes)",
    "threads_per_simdgroup": "uint(mh::kLanes)",
    "thread_execution_width": "uint(mh::kLanes)",
    "threadgroup_position_in_grid": _DIM3.format("group"),
    "threads_per_threadgroup": _DIM3.format("threads_per_group"),
    "threads_per_grid": _DIM3.format("grid"),
    "grid_size": _DIM3.format("grid"),
    "threadgroups_per_grid": _DIM3.format("groups"),
    "thread_position_in_threadgroup": "metal::mh_position_in_threadgroup()",
    "thread_position_in_grid": "metal::mh_position_in_grid()",
}
_POSITIONS = """
static metal::uint3 mh_position_in_threadgroup() {
    const auto& t = mh::machine.threads_per_group;
    const uint i = uint(mh::machine.current->index);
    return {i % t.x, i / t.x % t.y, i / t.x / t.y};
}
static metal::uint3 mh_position_in_grid() {
    const auto &t = mh::machine.threads_per_group, &g = mh::machine.group;
    const metal::uint3 i = mh_position_in_threadgroup();
    return {g.x * t.x + i.x, g.y * t.y + i.y, g.z * t.z + i.z};
}
"""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A buffer of the kernel, in the order of the signature."""

    name: str
    index: int
    written: bool


@dataclass(frozen=True, kw_only=True)
class HostSource:
    """One kernel as C++: the text, its buffers, and whether the source forbids contraction."""

    text: str
    arguments: tuple[Argument, ...]
    forbids_contraction: bool


def rewrite(source: str) -> HostSource:
    """The exact source that MLX compiles (header, signature, body, instantiation) -> C++ that the shim runs.

    Raises MetalHostError for what the shim does not know: a threadgroup array of two dimensions, an attribute.
    """
    forbids = bool(_PRAGMA.search(source))
    plain = _COMMENT.sub(" ", source)
    template = _TEMPLATE.search(plain)
    plain = _TEMPLATE.sub("", plain)
    kernels = list(_KERNEL.finditer(plain))
    if len(kernels) != 1:
        raise MetalHostError(f"the source has {len(kernels)} kernels, the host runs exactly one; split the source")
    arguments, values = [], []
    for parameter in (x.strip() for x in _split(kernels[0][2])):
        if buffer := _BUFFER.match(parameter):
            name, index, kind = buffer["name"], int(buffer["index"]), buffer["type"]
            arguments.append(Argument(name=name, index=index, written="const" not in kind.split()))
            pointer = f"mh::argument<{_pointers(kind.replace('&', '*'))}>({index})"
            values.append(f"{pointer}[0].load()" if "&" in kind else pointer)
        elif (attribute := _ATTRIBUTE.match(parameter)) and attribute["attribute"] in ATTRIBUTES:
            value = ATTRIBUTES[attribute["attribute"]]
            values.append(value + (".x" if attribute["type"] == "uint" and not value.startswith("uint") else ""))
        else:
            raise MetalHostError(f"parameter {parameter!r} is not a buffer or an attribute that the host knows")
    call = f"{kernels[0][1]}{template[2] if template else ''}({', '.join(values)});"
    # Inside the namespace: the C library has functions of the same names outside it.
    text = f"""#include <metal_stdlib>
namespace metal {{
{_POSITIONS}
{_pointers(_arrays(plain))}
}}  // namespace metal
void mh::call_kernel() {{
    using namespace metal;
    metal::{call}
}}
extern "C" __attribute__((visibility("default"))) int mh_run(const mh::Buffer* buffers, int count, const uint* sizes,
        int schedule, uint64_t seed, int races, char* error, int error_bytes) {{
    return mh::run(buffers, count, {{sizes[0], sizes[1], sizes[2]}}, {{sizes[3], sizes[4], sizes[5]}}, schedule, seed,
                   races, error, error_bytes);
}}
"""
    return HostSource(text=text, arguments=tuple(arguments), forbids_contraction=forbids)


def _split(parameters: str) -> list[str]:
    return [x for x in re.split(r",(?![^<(\[]*[>)\]])", parameters) if x.strip()]


def _arrays(text: str) -> str:
    count = 0

    def array(match: re.Match[str]) -> str:
        nonlocal count
        kind, name, dims = match.groups()
        if dims.count("[") != 1:
            raise MetalHostError(f"threadgroup {kind} {name}{dims}: the host knows arrays of one dimension; flatten it")
        count += 1
        return f'auto {name} = mh::threadgroup_array<{kind}>({count - 1}, size_t({dims[1:-1]}), "{name}");'

    return _ARRAY.sub(array, text)


def _pointers(text: str) -> str:
    def pointer(match: re.Match[str]) -> str:
        before, space, after, kind, trailing, sign = match.groups()
        const = "const " if before or after or trailing else ""
        if space == "thread" or (space, sign) == ("constant", "&"):
            return f"{const}{kind}{sign}"
        if sign == "&":
            return f"mh::Reference<mh::{SPACES[space]}, {const}{kind}>"
        return f"mh::Pointer<mh::{SPACES[space]}, {const}{kind}>"

    return _POINTER.sub(pointer, text)
