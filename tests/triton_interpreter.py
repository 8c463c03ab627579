"""Triton's interpreter, made faster for the tests: more than half of its time went into work that it repeats.

Triton 3.7 patches `triton.language` anew for each function of a kernel that is called, 3 ms; makes a table of 18 types
whenever it looks one of them up; and computes whether an integer overflows for an assertion that is off. Other versions
of Triton are left as they are where they differ.
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
