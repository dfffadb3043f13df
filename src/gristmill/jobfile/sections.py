"""The sections of a job file as pydantic models, built from the frozen descriptions in job, specs and options, so that
a field is defined once. Only job files import this module: a job given as a command, or in Python, needs no pydantic.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, create_model

from gristmill.errors import BadJob, nearest
from gristmill.job.annotations import Option, options_of
from gristmill.job.delivery import Delivery
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import ENGINES, EngineSpec, Gates, Running, Update
from gristmill.job.recipients import HEADS
from gristmill.job.schedule import Schedule
from gristmill.job.specs import MODELS, Call, ModelSpec, Step, head_of, kind_in, of_call
from gristmill.job.synonyms import meant, said
from gristmill.job.typechecks import expected, field_type
from gristmill.jobfile.document import Document, Path
from gristmill.jobfile.variables import dotted

STEPS = {
    "map": "A function on a batch that keeps the row count, as MODULE:NAME",
    "flat_map": "A function that turns one row into many: it gets a dict and returns a list of dicts; MODULE:NAME",
    "filter": "An SQL condition, or MODULE:NAME of a function that returns one bool per row",
}
# Functions of these steps get rows one by one, the others batches; as in gm.flat_map and gm.step.
BATCH_FORMAT = {"map": "numpy", "flat_map": "rows", "filter": "numpy"}
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

_CONFIG = ConfigDict(extra="forbid", protected_namespaces=())
Fields = dict[str, Any]


def _fields(cls: type[Any], *, drop: tuple[str, ...] = (), head: str = "") -> Fields:
    """The options of a class as pydantic's; the first one is called `head`, if that is given."""
    made: Fields = {}
    for field in dataclasses.fields(cls):
        name = head if head and not made else field.name
        default: dict[str, Any] = {}
        if field.default is not dataclasses.MISSING:
            default["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default["default_factory"] = field.default_factory
        made[name] = _field(options_of(cls)[field.name], **default)
    return {name: field for name, field in made.items() if name not in drop}


def _field(option: Option, hint: Any = None, **default: Any) -> tuple[Any, Any]:
    """An option as pydantic's, of another type if one is given; without a default it is required."""
    text = "" if option.help is None else option.help.text
    return hint or field_type(option.hint), Field(description=text, **default)


def _model(
    name: str, fields: Fields, *, extra: Literal["forbid", "allow"] = "forbid", doc: str = ""
) -> type[BaseModel]:
    made: type[BaseModel] = create_model(name, __config__=_CONFIG | ConfigDict(extra=extra), __doc__=doc, **fields)
    return made


def _callable(key: str, text: str) -> Fields:
    fields = _fields(Call, drop=("target", "batch_format"))
    form = _field(options_of(Call)["batch_format"], default=BATCH_FORMAT.get(key, "numpy"))
    return {key: (str, Field(description=text)), **fields, "batch_format": form}


@functools.cache
def _kind(key: str) -> type[BaseModel]:
    """The section of a kind of model: its first field is under the key that names the kind."""
    cls = MODELS.get(key)
    if of_call(cls):
        target = _fields(Call)["target"][1].description
        fields = {**_callable(key, target), **_fields(cls, drop=(head_of(cls),))}
    else:
        fields = _fields(cls, head=key)
    return _model(f"Model {key}", fields, doc=fields[key][1].description)


def _tagged(models: Mapping[str, type[BaseModel]]) -> Any:
    """A union in which the key that is present decides. Tags are in <> so that no field can be mistaken for one."""

    def which(value: Any) -> str | None:
        return next((f"<{key}>" for key in models if isinstance(value, dict) and key in value), None)

    union: Any = None
    for key, made in models.items():
        one = Annotated[made, Tag(f"<{key}>")]  # type: ignore[valid-type]
        union = one if union is None else union | one
    return Annotated[union, Discriminator(which)]


SourceSection = _model("Source", {**_fields(Source, drop=("data",)), "uri": _field(options_of(Source)["uri"])})
SinkSection = _model("Sink", _fields(Sink))
DeliverySection = _model("Delivery", _fields(Delivery))
TOLD_SECTIONS = {name: _model(cls.__name__, _fields(cls)) for name, (cls, _) in HEADS.items()}
RunningSection = _model("Running", _fields(Running))
GatesSection = _model("Gates", _fields(Gates))
UpdateSection = _model("Update", _fields(Update))
ScheduleSection = _model("Schedule", _fields(Schedule))
EngineSection = _model("Engine", _fields(EngineSpec, drop=("options",)), extra="allow")
STEP_SECTIONS = {key: _model(f"Step {key}", _callable(key, text), doc=text) for key, text in STEPS.items()}

_STEPS: Any = list[_tagged(STEP_SECTIONS)]  # type: ignore[misc]


_VARS = "Variables, used as ${name} anywhere below; inside a text, exactly as written. --var name=value sets one"
_PROFILES = "Named changes to this job, selected with --profile and merged over it"


@functools.cache
def _job(kinds: tuple[str, ...]) -> type[BaseModel]:
    """The section of a whole job, whose model may be of these kinds."""
    said, own = options_of(JobSpec), _fields(JobSpec)
    variables = dict[str, str | int | float | bool | None]
    return _model(
        "Job",
        {
            "vars": (variables, Field(description=_VARS, default_factory=dict)),
            "source": _field(said["source"], SourceSection),
            "steps": _field(said["steps"], _STEPS, default_factory=list),
            "model": _field(said["model"], _tagged({key: _kind(key) for key in kinds})),
            "post": _field(said["post"], _STEPS, default_factory=list),
            "sink": _field(said["sink"], SinkSection | None, default=None),
            **{name: own[name] for name in own if name.startswith("on_")},
            "update": _field(said["update"], UpdateSection | bool | None, default=None),
            "gates": _field(said["gates"], GatesSection, default_factory=GatesSection),
            "deliver": _field(said["deliver"], list[DeliverySection], default_factory=list),  # type: ignore[valid-type]
            **{
                name: _field(said[name], list[made], default_factory=list)  # type: ignore[valid-type]
                for name, made in TOLD_SECTIONS.items()
            },
            "audit": _field(said["audit"], str | list[str], default_factory=list),
            "reduce": _field(said["reduce"], str | None, default=None),
            "schedule": _field(said["schedule"], ScheduleSection | None, default=None),
            "deadline": own["deadline"],
            "engine": _field(said["engine"], EngineSection, default_factory=EngineSection),
            "running": _field(said["running"], RunningSection, default_factory=RunningSection),
            "profiles": (dict[str, dict[str, Any]], Field(description=_PROFILES, default_factory=dict)),
        },
        doc="A gristmill job",
    )


JobSection = _job(tuple(MODELS.ours))


def _job_of(value: Mapping[str, Any]) -> type[BaseModel]:
    """The section of this job: other packages' kinds of models are searched only if it names none of ours."""
    model = value.get("model")
    kind = kind_in(model) if isinstance(model, dict) else None
    return JobSection if kind is None or kind in MODELS.ours else _job((*MODELS.ours, kind))


# ---------------------------------------------------------------- reading


def validated(document: Document) -> JobSpec:
    """The job that a document (merged and filled in) describes. Raises BadJob, with the place of each error."""
    _check_kinds(document)
    try:
        job = _job_of(document.value).model_validate(document.value)
    except ValidationError as e:
        raise BadJob("\n".join(_lines(document, e))) from None
    return _built(document, job)


def check_keys(document: Document) -> None:
    """Raises BadJob for keys that should not be there, and for nothing else: references are not filled in yet."""
    _check_kinds(document)
    try:
        _job_of(document.value).model_validate(document.value)
    except ValidationError as e:
        known = [item for item in e.errors() if item["type"] == "extra_forbidden"]
        paths = [_path(document.value, item) for item in known]
        if paths:
            raise BadJob(
                "\n".join(_unknown(document, path, _fields_at(document.value, path[:-1])) for path in paths)
            ) from None
    engine = document.value.get("engine")
    if isinstance(engine, dict) and engine.get("name", EngineSpec.name) in ENGINES.names:
        _check_engine(document, engine.get("name", EngineSpec.name), engine)


def _built(document: Document, job: Any) -> JobSpec:
    made: dict[str, Any] = {}
    given = job.model_fields_set
    for name, cls in (
        ("source", Source),
        ("sink", Sink),
        ("gates", Gates),
        ("running", Running),
        ("engine", EngineSpec),
        ("schedule", Schedule),
    ):
        section = getattr(job, name)
        if name in given and section is not None:
            made[name] = _placed(document, (name,), cls, {**_given(section), **_extra(document, section)})
    for name in ("steps", "post"):
        made[name] = tuple(_step(document, (name, i), section) for i, section in enumerate(getattr(job, name)))
    made["model"] = _model_spec(document, job.model)
    made["deliver"] = tuple(
        _placed(document, ("deliver", i), Delivery, _given(section)) for i, section in enumerate(job.deliver)
    )
    if isinstance(job.update, UpdateSection):
        made["update"] = _placed(document, ("update",), Update, _given(job.update))
    else:
        made["update"] = job.update
    for name, (cls, _) in HEADS.items():
        some = enumerate(getattr(job, name))
        made[name] = tuple(_placed(document, (name, i), cls, _given(section)) for i, section in some)
    made |= {name: getattr(job, name) for name in ("on_null", "on_nan", "on_new_files", "audit", "reduce")}
    made |= {name: getattr(job, name) for name in ("deadline", "on_deadline")}
    spec: JobSpec = _placed(document, (), JobSpec, made)
    return spec


def _placed(document: Document, path: Path, cls: Any, values: Mapping[str, Any]) -> Any:
    """An instance; an error of its own checks is raised with the place."""
    try:
        return cls(**values)
    except BadJob as e:
        # Such messages name the field; if that has a place of its own, it is the one to show.
        found = {name: match.start() for name in values if (match := re.search(rf"\b{name}\b", str(e)))}
        named = min(found, key=lambda name: found[name], default=None)
        raise type(e)(f"{document.place(path if named is None else (*path, named))}: {e}") from None


def _given(section: BaseModel) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields if name in section.model_fields_set}


def _extra(document: Document, section: BaseModel) -> dict[str, Any]:
    """An engine's keys beyond the common fields: its own options."""
    extra = section.model_extra
    if not extra:
        return {} if extra is None else {"options": {}}
    _check_engine(document, section.name, extra)  # type: ignore[attr-defined]
    return {"options": dict(extra)}


def _check_engine(document: Document, name: str, keys: Iterable[str]) -> None:
    own = _placed(document, ("engine",), EngineSpec, {"name": name}).own_names
    known = [*EngineSection.model_fields, *own]
    if (unknown := next((key for key in keys if key not in known), None)) is not None:
        raise BadJob(_unknown(document, ("engine", unknown), known))


def _model_spec(document: Document, section: BaseModel) -> ModelSpec:
    kind = str(kind_in(type(section).model_fields))
    cls, values = MODELS.get(kind), _given(section)
    under = values.pop(kind)
    if of_call(cls):
        under = _placed(document, ("model", kind), Call, {"target": under, **_call_values(values)})
    spec: ModelSpec = _placed(document, ("model",), cls, {head_of(cls): under, **values})
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
    """A model or a step must have exactly one of the keys that name its kind; pydantic would only say "no match"."""
    model = document.value.get("model")
    if isinstance(model, dict):
        kind = kind_in(model)
        names = tuple(MODELS.ours) if kind in MODELS.ours else MODELS.names
        fields = () if kind is None else options_of(MODELS.get(kind))  # `embed` may have a `prompt`
        _one_of(document, ("model",), model, tuple(name for name in names if name == kind or name not in fields))
    for name in ("steps", "post"):
        steps = document.value.get(name)
        for i, step in enumerate(steps if isinstance(steps, list) else ()):
            if isinstance(step, dict):
                _one_of(document, (name, i), step, tuple(STEPS))


def _one_of(document: Document, path: Path, value: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    found = [key for key in value if key in keys]
    if len(found) == 1:
        return
    place = document.place((*path, found[1])) if found else document.place(path)
    if found:
        raise BadJob(f"{place}: {dotted(path)} has both {found[0]} and {found[1]}: keep one of them")
    near = next((f": did you mean {close!r} by {key!r}?" for key in value if (close := nearest(str(key), keys))), "")
    raise BadJob(f"{place}: {dotted(path)} does not say what it is: give one of {', '.join(keys)}{near}")


def _lines(document: Document, error: ValidationError) -> Iterator[str]:
    """One line for each wrong place, what is missing last: a mistyped key may be why. A union's errors count as one."""
    grouped: dict[Path, list[Mapping[str, Any]]] = {}
    for item in sorted(error.errors(), key=lambda item: item["type"] == "missing"):
        grouped.setdefault(_path(document.value, item), []).append(item)
    around = {path[:n] for path in grouped for n in range(len(path))}  # it would fit but for what is wrong inside
    for path, items in grouped.items():
        if path in around:
            continue
        if any(item["type"] == "extra_forbidden" for item in items):
            yield _unknown(document, path, _fields_at(document.value, path[:-1]))
        elif any(item["type"] == "missing" for item in items):
            field = str(path[-1])
            yield f"{document.place(path[:-1])}: {dotted(path)} is missing: {_about(document.value, path) or field}"
        else:
            value = _at(document.value, path)
            more = _as_json(document, path, value) + _instead(path, value)
            yield f"{document.place(path)}: {dotted(path)}: {expected(value, items)}{more}"


def _instead(path: Path, value: Any) -> str:
    """What was most likely meant by a value of another type: a key without its name, a share as per cent, a function
    or a model without the key that says what it is.
    """
    if path == ("model",):
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) and value else '"module:name"'
        return f", such as {{{'call' if ':' in text else 'embed'}: {text}}}"
    if path[0] in ("steps", "post") and len(path) == 2:  # texts are taken, as they are
        return ', such as {map: "module:name"}'
    if path == ("update",) and isinstance(value, (str, list)):
        return f", such as update: {{key: [{', '.join([value] if isinstance(value, str) else map(str, value))}]}}"
    share = re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?%", value) if path[0] == "gates" and isinstance(value, str) else None
    return f", which for {value} is {round(float(share[1]) / 100, 6):g}" if share else ""


def _as_json(document: Document, path: Path, value: Any) -> str:
    """What to say of a list or mapping that `--set` was given, but not as JSON."""
    typed = (
        isinstance(value, str) and value.lstrip().startswith(("[", "{")) and document.place(path).startswith("--set")
    )
    return ' as JSON, whose texts are in quotes, such as [{"map": "module:name"}]' if typed else ""


def _path(value: Any, item: Mapping[str, Any]) -> Path:
    """Where in the document an error is: pydantic's place without the names of the unions on the way."""
    path: Path = ()
    for part in item["loc"]:
        if isinstance(part, str) and part.startswith("<"):
            continue
        inside = (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        )
        if inside:
            path, value = (*path, part), value[part]
    return (*path, item["loc"][-1]) if item["type"] == "missing" else path


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
        return None if (kind := kind_in(here)) is None else _kind(kind)
    if path[0] in ("steps", "post") and len(path) == 2:
        return next((STEP_SECTIONS[key] for key in STEP_SECTIONS if key in here), None)
    if path[0] == "deliver" and len(path) == 2:
        return DeliverySection
    if path[0] in TOLD_SECTIONS and len(path) == 2:
        return TOLD_SECTIONS[str(path[0])]
    sections = {**_SECTIONS, "update": UpdateSection}
    return sections.get(str(path[0])) if len(path) == 1 else None


def _fields_at(value: Any, path: Path) -> Iterable[str]:
    section = _section_at(value, path)
    return section.model_fields if section is not None else ()


def _about(value: Any, path: Path) -> str | None:
    section = _section_at(value, path[:-1])
    field = section.model_fields.get(str(path[-1])) if section is not None else None
    return None if field is None or field.description is None else field.description


def _unknown(document: Document, path: Path, known: Iterable[str]) -> str:
    """The line for an unknown key, with the nearest known one, here or in another section."""
    key, known = str(path[-1]), list(known)
    where = f"{dotted(path[:-1])} has" if path[:-1] else "a job has"
    if path == ("model", "model") and "llm" in known:
        hint = "the language model's name is llm: …"
    elif len(path) > 1 and key in JobSection.model_fields:
        hint = f"it is a key of the job itself: write {key}: … at its top"
    elif (near := meant(key, known)) is not None:
        hint = f"did you mean {near!r}?"
    elif len(homes := [name for name, section in _SECTIONS.items() if key in section.model_fields]) > (len(path) == 1):
        hint = f"it is a key of {' and of '.join(homes)}: write {homes[0]}: {{{key}: …}}"
    elif home := _home(key, alike=False):
        hint = f"did you mean {home[0]}: {{{home[1]}: …}}?"
    elif len(path) == 1 and any(key in options_of(MODELS.get(kind)) for kind in MODELS.ours):
        hint = f"it is a key of model: write model: {{…, {key}: …}}"
    elif path[0] == "source" and (near := meant(key, _OF_TEXT)):
        hint = f"did you mean options: {{{near}: …}}?"
    elif instead := said(key):
        hint = instead
    elif near := nearest(key, known):
        hint = f"did you mean {near!r}?"
    elif home := _home(key):
        hint = f"did you mean {home[0]}: {{{home[1]}: …}}?"
    else:
        hint = f"its keys are {', '.join(known)}"
    return f"{document.place(path)}: {where} no key {key!r}: {hint}"


_SECTIONS: dict[str, type[BaseModel]] = {
    "running": RunningSection, "source": SourceSection, "sink": SinkSection, "gates": GatesSection,
    "engine": EngineSection, "schedule": ScheduleSection,
}  # fmt: skip


_OF_TEXT = ("delimiter", "quote", "header", "names", "nulls")  # options of CSV


def _home(key: str, *, alike: bool = True) -> tuple[str, str] | None:
    """The section and field that a misplaced key was meant to be, under its own name or that of elsewhere; or else,
    where those that are `alike` count, a mistyped one.
    """
    homes = {field: name for name, section in reversed(_SECTIONS.items()) for field in section.model_fields}
    del homes["vars"]  # which are keys of the job, too
    near = key if key in homes else meant(key, homes) or (nearest(key, homes) if alike else None)
    return None if near is None else (homes[near], near)


# ---------------------------------------------------------------- the schema


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of job files, for editors: shorthands, and `${…}` in place of numbers, are allowed too."""
    schema = _job(MODELS.names).model_json_schema()
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
    for name in ("deliver", *HEADS):
        properties[name]["items"] = _or_text(properties[name]["items"])
        properties[name] = _or_text(properties[name])
    properties["schedule"] = _or_text(properties["schedule"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A gristmill job"}


def _or_text(schema: dict[str, Any], many: bool = False) -> dict[str, Any]:
    shorthand: list[dict[str, Any]] = [{"type": "string"}]
    if many:
        shorthand.append({"type": "array", "items": {"type": "string"}})
    about: dict[str, Any] = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return {**about, "anyOf": [*shorthand, schema]}


def _allow_references(node: Any) -> None:
    """Numbers and booleans may be written as a reference, which is text until it is filled in."""
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
