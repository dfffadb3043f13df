"""The sections of a job file as pydantic models, made from the frozen descriptions in job, specs and options, so that
a field exists once. Only job files import this module: a job typed as a command, or in Python, does without pydantic.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, create_model

from gristmill.errors import BadJob
from gristmill.plan.document import Document, Path
from gristmill.plan.fields import about
from gristmill.plan.job import JobSpec, Sink, Source
from gristmill.plan.options import EngineSpec, Gates, Running
from gristmill.plan.overlay import KIND_OF
from gristmill.plan.specs import Call, FunctionModel, ModelSpec, Step
from gristmill.plan.typed import expected, field_type
from gristmill.plan.variables import dotted

# The key that says what kind of model it is, and holds its path.
KINDS = {key: cls for cls, key in KIND_OF.items()}
STEPS = ("map", "flat_map", "filter")
# Functions of these steps get rows one by one, the others batches; as gm.flat_map and gm.step have it.
BATCH_FORMAT = {"map": "numpy", "flat_map": "rows", "filter": "numpy"}
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

_CONFIG = ConfigDict(extra="forbid", protected_namespaces=())
Fields = dict[str, Any]


def _fields(
    cls: type[Any],
    section: str,
    *,
    only: tuple[str, ...] | None = None,
    drop: tuple[str, ...] = (),
    rename: Mapping[str, str] | None = None,
) -> Fields:
    hints = get_type_hints(cls)
    made: Fields = {}
    for field in dataclasses.fields(cls):
        if field.name in drop or (only is not None and field.name not in only):
            continue
        name = (rename or {}).get(field.name, field.name)
        options: dict[str, Any] = {"description": about(section, name)}
        if field.default is not dataclasses.MISSING:
            options["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            options["default_factory"] = field.default_factory
        made[name] = (field_type(hints[field.name]), Field(**options))
    return made


def _model(
    name: str, fields: Fields, *, extra: Literal["forbid", "allow"] = "forbid", doc: str = ""
) -> type[BaseModel]:
    made: type[BaseModel] = create_model(name, __config__=_CONFIG | ConfigDict(extra=extra), __doc__=doc, **fields)
    return made


def _required(fields: Fields, section: str, name: str) -> Fields:
    return {**fields, name: (fields[name][0], Field(description=about(section, name)))}


def _callable(key: str, section: str) -> Fields:
    rest = _fields(Call, section, drop=("target", "batch_format"))
    hint = get_type_hints(Call)["batch_format"]
    return {
        key: (str, Field(description=about(section, key))),
        **rest,
        "batch_format": (
            hint,
            Field(default=BATCH_FORMAT.get(key, "numpy"), description=about(section, "batch_format")),
        ),
    }


def _kind(key: str) -> type[BaseModel]:
    if key == "call":
        fields = {**_callable("call", "model"), **_fields(FunctionModel, "model", drop=("call",))}
    else:
        fields = _fields(KINDS[key], "model", rename={"model": key})
    return _model(f"Model {key}", fields, doc=about("model", key))


def _tagged(models: Mapping[str, type[BaseModel]]) -> Any:
    """A union told apart by which of the keys is there. Tags are in <> so that no field can be mistaken for one."""

    def which(value: Any) -> str | None:
        return next((f"<{key}>" for key in models if isinstance(value, dict) and key in value), None)

    union: Any = None
    for key, made in models.items():
        one = Annotated[made, Tag(f"<{key}>")]  # type: ignore[valid-type]
        union = one if union is None else union | one
    return Annotated[union, Discriminator(which)]


SourceSection = _model("Source", _required(_fields(Source, "source", drop=("data",)), "source", "uri"))
SinkSection = _model("Sink", _fields(Sink, "sink"))
RunningSection = _model("Running", _fields(Running, "running"))
GatesSection = _model("Gates", _fields(Gates, "gates"))
EngineSection = _model("Engine", _fields(EngineSpec, "engine", drop=("options",)), extra="allow")
MODELS = {key: _kind(key) for key in KINDS}
STEP_SECTIONS = {key: _model(f"Step {key}", _callable(key, "step"), doc=about("step", key)) for key in STEPS}

_STEPS: Any = list[_tagged(STEP_SECTIONS)]  # type: ignore[misc]


def _top(name: str, hint: Any, **options: Any) -> Fields:
    return {name: (hint, Field(description=about("job", name), **options))}


JobSection = _model(
    "Job",
    {
        **_top("vars", dict[str, str | int | float | bool | None], default_factory=dict),
        **_top("source", SourceSection),
        **_top("steps", _STEPS, default_factory=list),
        **_top("model", _tagged(MODELS)),
        **_top("post", _STEPS, default_factory=list),
        **_top("sink", SinkSection | None, default=None),
        **_fields(JobSpec, "job", only=("on_null", "on_nan", "on_new_files")),
        **_top("gates", GatesSection, default_factory=GatesSection),
        **_top("audit", str | list[str], default_factory=list),
        **_top("engine", EngineSection, default_factory=EngineSection),
        **_top("running", RunningSection, default_factory=RunningSection),
        **_top("profiles", dict[str, dict[str, Any]], default_factory=dict),
    },
    doc="A gristmill job",
)


# ---------------------------------------------------------------- reading


def validated(document: Document) -> JobSpec:
    """The job that a document (merged and filled in) describes. Raises BadJob, with the place of each error."""
    _check_kinds(document)
    try:
        job = JobSection.model_validate(document.value)
    except ValidationError as e:
        raise BadJob("\n".join(_lines(document, e))) from None
    return _built(document, job)


def check_keys(document: Document) -> None:
    """Raises BadJob for keys that should not be there, and for nothing else: references are not filled in yet."""
    _check_kinds(document)
    try:
        JobSection.model_validate(document.value)
    except ValidationError as e:
        known = [item for item in e.errors() if item["type"] == "extra_forbidden"]
        paths = [_path(document.value, item) for item in known]
        if paths:
            raise BadJob(
                "\n".join(_unknown(document, path, _fields_at(document.value, path[:-1])) for path in paths)
            ) from None


def _built(document: Document, job: Any) -> JobSpec:
    made: dict[str, Any] = {}
    given = job.model_fields_set
    for name, cls in (
        ("source", Source),
        ("sink", Sink),
        ("gates", Gates),
        ("running", Running),
        ("engine", EngineSpec),
    ):
        section = getattr(job, name)
        if name in given and section is not None:
            made[name] = _placed(document, (name,), cls, {**_given(section), **_extra(document, section)})
    for name in ("steps", "post"):
        made[name] = tuple(_step(document, (name, i), section) for i, section in enumerate(getattr(job, name)))
    made["model"] = _model_spec(document, job.model)
    made |= {name: getattr(job, name) for name in ("on_null", "on_nan", "on_new_files", "audit")}
    spec: JobSpec = _placed(document, (), JobSpec, made)
    return spec


def _placed(document: Document, path: Path, cls: Any, values: Mapping[str, Any]) -> Any:
    """An instance; what its own checks refuse is told with the place."""
    try:
        return cls(**values)
    except BadJob as e:
        # Such messages name the field; where it was given a place of its own, that is the one to show.
        found = {name: match.start() for name in values if (match := re.search(rf"\b{name}\b", str(e)))}
        named = min(found, key=lambda name: found[name], default=None)
        raise type(e)(f"{document.place(path if named is None else (*path, named))}: {e}") from None


def _given(section: BaseModel) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields if name in section.model_fields_set}


def _extra(document: Document, section: BaseModel) -> dict[str, Any]:
    """What an engine is given beyond the common fields: its own options. The local engine has none."""
    extra = section.model_extra
    if extra is None:
        return {}
    if extra and getattr(section, "name", None) == "local":
        unknown = next(iter(extra))
        raise BadJob(_unknown(document, ("engine", unknown), EngineSection.model_fields))
    return {"options": dict(extra)}


def _model_spec(document: Document, section: BaseModel) -> ModelSpec:
    kind = next(key for key, made in MODELS.items() if isinstance(section, made))
    values = _given(section)
    target = values.pop(kind)
    if kind == "call":
        call = _placed(document, ("model", "call"), Call, {"target": target, **_call_values(values)})
        return FunctionModel(call, **values)
    spec: ModelSpec = _placed(document, ("model",), KINDS[kind], {"model": target, **values})
    return spec


def _call_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values.pop(name) for name in ("args", "batch_format", "takes") if name in values}


def _step(document: Document, path: Path, section: BaseModel) -> Step:
    kind = next(key for key, made in STEP_SECTIONS.items() if isinstance(section, made))
    values = _given(section)
    target = values.pop(kind)
    if kind == "filter" and not CALLABLE.fullmatch(target):
        return Step("filter", None, target)
    values.setdefault("batch_format", BATCH_FORMAT[kind])
    call = _placed(document, (*path, kind), Call, {"target": target, **values})
    return Step(kind, call)  # type: ignore[arg-type]


# ---------------------------------------------------------------- errors


def _check_kinds(document: Document) -> None:
    """A model or a step must have exactly one of the keys that say what it is; pydantic would only say "no match"."""
    model = document.value.get("model")
    if isinstance(model, dict):
        _one_of(document, ("model",), model, tuple(KINDS))
    for name in ("steps", "post"):
        steps = document.value.get(name)
        for i, step in enumerate(steps if isinstance(steps, list) else ()):
            if isinstance(step, dict):
                _one_of(document, (name, i), step, STEPS)


def _one_of(document: Document, path: Path, value: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    found = [key for key in value if key in keys]
    if len(found) == 1:
        return
    place = document.place((*path, found[1])) if found else document.place(path)
    if found:
        raise BadJob(f"{place}: {dotted(path)} has both {found[0]} and {found[1]}: keep one of them")
    near = next((f": did you mean {close[0]!r} by {key!r}?" for key in value if (close := _near(key, keys))), "")
    raise BadJob(f"{place}: {dotted(path)} does not say what it is: give one of {', '.join(keys)}{near}")


def _near(name: object, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(str(name), list(known), 1)


def _lines(document: Document, error: ValidationError) -> Iterator[str]:
    """One line for each place that is wrong, in the order of the file; a union's errors are one."""
    grouped: dict[Path, list[Mapping[str, Any]]] = {}
    for item in error.errors():
        grouped.setdefault(_path(document.value, item), []).append(item)
    for path, items in grouped.items():
        if any(item["type"] == "extra_forbidden" for item in items):
            yield _unknown(document, path, _fields_at(document.value, path[:-1]))
        elif any(item["type"] == "missing" for item in items):
            field = str(path[-1])
            yield f"{document.place(path[:-1])}: {dotted(path)} is missing: {_about(document.value, path) or field}"
        else:
            yield f"{document.place(path)}: {dotted(path)}: {expected(_at(document.value, path), items)}"


def _path(value: Any, item: Mapping[str, Any]) -> Path:
    """Where in the document an error is: pydantic's place without the names of unions that it passed through."""
    path: Path = ()
    for part in item["loc"]:
        if isinstance(part, str) and part.startswith("<"):
            continue
        inside = (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        )
        if not inside:
            return (*path, part) if item["type"] == "missing" else path
        path, value = (*path, part), value[part]
    return path


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def _section_at(value: Any, path: Path) -> type[BaseModel] | None:
    """The section that the mapping at `path` is read by."""
    if not path:
        return JobSection
    here = _at(value, path)
    if path == ("model",):
        return next((MODELS[key] for key in MODELS if key in here), None)
    if path[0] in ("steps", "post") and len(path) == 2:
        return next((STEP_SECTIONS[key] for key in STEP_SECTIONS if key in here), None)
    sections = {"source": SourceSection, "sink": SinkSection, "running": RunningSection, "gates": GatesSection}
    return {**sections, "engine": EngineSection}.get(str(path[0])) if len(path) == 1 else None


def _fields_at(value: Any, path: Path) -> Iterable[str]:
    section = _section_at(value, path)
    return section.model_fields if section is not None else ()


def _about(value: Any, path: Path) -> str | None:
    section = _section_at(value, path[:-1])
    field = section.model_fields.get(str(path[-1])) if section is not None else None
    return None if field is None or field.description is None else field.description


def _unknown(document: Document, path: Path, known: Iterable[str]) -> str:
    """The line for a key that is none, with the nearest one that is, here or in another section."""
    key, known = str(path[-1]), list(known)
    where = f"{dotted(path[:-1])} has" if path[:-1] else "a job has"
    if len(path) > 1 and key in JobSection.model_fields:
        hint = f"it is a key of the job itself: write {key}: … at its top"
    elif len(homes := [name for name, section in _SECTIONS.items() if key in section.model_fields]) > 1:
        hint = f"it is a key of {' and of '.join(homes)}: write {homes[0]}: {{{key}: …}}"
    elif near := _near(key, known):
        hint = f"did you mean {near[0]!r}?"
    elif home := _home(key):
        hint = f"did you mean {home[0]}: {{{home[1]}: …}}?"
    else:
        hint = f"its keys are {', '.join(known)}"
    return f"{document.place(path)}: {where} no key {key!r}: {hint}"


_SECTIONS: dict[str, type[BaseModel]] = {
    "running": RunningSection, "source": SourceSection, "sink": SinkSection, "gates": GatesSection,
    "engine": EngineSection,
}  # fmt: skip


def _home(key: str) -> tuple[str, str] | None:
    """The section and the field in it that a key out of place, or mistyped, was most likely meant to be."""
    homes = {field: name for name, section in reversed(_SECTIONS.items()) for field in section.model_fields}
    near = _near(key, homes)
    return (homes[near[0]], near[0]) if near else None


# ---------------------------------------------------------------- the schema


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of job files, for editors: shorthands, and `${…}` in place of numbers, are allowed too."""
    schema = JobSection.model_json_schema()
    for name, section in schema["$defs"].items():
        if "required" in section and name.startswith(("Model", "Step")):
            section["title"] = name.lower()
    _allow_references(schema)
    properties = schema["properties"]
    properties["source"] = _or_text(properties["source"], many=True)
    properties["sink"] = _or_text(properties["sink"])
    properties["engine"] = _or_text(properties["engine"])
    for name in ("steps", "post"):
        properties[name]["items"] = _or_text(properties[name]["items"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A gristmill job"}


def _or_text(schema: dict[str, Any], many: bool = False) -> dict[str, Any]:
    shorthand: list[dict[str, Any]] = [{"type": "string"}]
    if many:
        shorthand.append({"type": "array", "items": {"type": "string"}})
    about: dict[str, Any] = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return {**about, "anyOf": [*shorthand, schema]}


def _allow_references(node: Any) -> None:
    """Numbers and booleans may be written as a reference, which is a text until it is filled in."""
    if isinstance(node, dict):
        if node.get("type") in ("integer", "number", "boolean"):
            kind = {key: node.pop(key) for key in list(node) if key not in ("description", "title", "default")}
            node["anyOf"] = [kind, {"type": "string", "pattern": r"^\$\{.+\}$"}]
            return
        for item in node.values():
            _allow_references(item)
    elif isinstance(node, list):
        for item in node:
            _allow_references(item)
