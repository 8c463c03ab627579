"""Triton's interpreter, made faster for the tests: more than half of its time went into work that it repeats.

Triton 3.7 patches `triton.language` anew for each function of a kernel that is called, 3 ms; makes a table of 18 types
whenever it looks one of them up; and computes whether an integer overflows for an assertion that is off. It also makes
and checks the shape of every block of numbers anew, though a kernel has a dozen shapes. Other versions of Triton are
left as they are where they differ.
"""

import sys
from typing import Any

DONE = "faster for the tests of regard"


def make_faster() -> None:
    """Replace those parts of the interpreter, once, if it was imported."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, DONE):
        return
    setattr(interpreter, DONE, True)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = patching_once(interpreter)
    interpreter._get_np_dtype = remembering(interpreter._get_np_dtype)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # then device_assert does nothing
        interpreter.interpreter_builder.options = type(options)(sanitize_overflow=False)
    if sys.modules["triton"].__version__.startswith("3.7."):
        remember_shapes(interpreter.tl.core)
        convert_what_differs(type(interpreter.interpreter_semantic))


def patching_once(interpreter: Any) -> Any:
    """Patch for a launch, and not again for the functions that its kernel calls."""
    in_full, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    used_by = dict[Any, list[Any]]()

    def patch(function: Any) -> Any:
        if function not in used_by:
            used_by[function] = [it for it in language if any(it is value for value in function.__globals__.values())]
        used = used_by[function]
        if used and not any(interpreter.tl.core.is_builtin(module.load) for module in used):
            return interpreter._LangPatchScope()  # nothing to restore
        return in_full(function)

    return patch


def remembering(numpy_type: Any) -> Any:
    """The numpy type of a type of Triton, by the name of the type."""
    known = dict[str, Any]()

    def of(triton_type: Any) -> Any:
        name = triton_type.scalar.name
        if name not in known:
            known[name] = numpy_type(triton_type)
        return known[name]

    return of


def remember_shapes(core: Any) -> None:
    """Make the shape of a block, with the checks of it, once; nothing changes a shape that there is."""
    blocks = dict[Any, Any]()
    shapes = dict[tuple[int, ...], Any]()
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        key = (element_ty.name, sizes) if all(type(size) is int for size in sizes) else None
        if key not in blocks:
            make_block(self, element_ty, shape)
            if key is not None:
                blocks[key] = (self.shape, self.numel, self.name)
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor(self: Any, handle: Any, of_type: Any) -> None:
        sizes = tuple(of_type.shape.values) if of_type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, of_type)
            shapes[sizes] = (self.shape, self.numel)
            return
        self.handle, self.type, self.dtype = handle, of_type, of_type.scalar
        self.shape, self.numel = shapes[sizes]

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def convert_what_differs(semantic: Any) -> None:
    """Leave operands of one shape, and numbers of the type that is wanted, as they are: most are so."""
    in_full, cast_in_full = semantic.broadcast_impl_value, semantic.cast

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return in_full(self, lhs, rhs)

    def cast(self: Any, given: Any, dst_ty: Any, *more: Any, **words: Any) -> Any:
        return given if given.type.scalar is dst_ty.scalar else cast_in_full(self, given, dst_ty, *more, **words)

    semantic.broadcast_impl_value = broadcast
    semantic.cast = cast
