"""The conversion of JSON schemas to a form that the grammar library can enforce. Pure.

Clients send schemas of any draft since 4, with annotations, keywords without effect, and all kinds of references. The
result uses a small part of draft 2020-12. Every instance of the result is an instance of the original schema. The
reverse holds too, except for a few constraints that the library can only read in a stricter form.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast
from urllib.parse import unquote, urljoin

from libs.model.schema_alternatives import TYPES, Alternatives, Schema, name_of, same, types_of
from libs.model.schema_keywords import (
    DRAFT,
    FORMATS,
    IN_PLACE,
    KEPT,
    KNOWN,
    MAX_DEPTH,
    MAX_EXACT,
    MAX_SIZE,
    NO_SCHEMAS,
    SIZES,
    TYPE_OF,
    NotEnforced,
    SchemaRefused,
)


def normalise(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equal or stricter schema that the grammar library can read. Raise SchemaRefused."""
    return _Document(schema).whole()


class _Document:
    """A schema with all subschemas that it refers to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        draft = str(root.get("$schema"))
        self._id = "id" if "draft-04" in draft else "$id"
        self._lone_refs = "draft-0" in draft
        """True if an `$id` beside a `$ref` has no effect, as in drafts up to 7."""
        self._path: list[str] = []
        self._resources: dict[str, Any] = {}
        """The schemas with an `$id`, by that id and by the URI to which it resolves."""
        self._bases: dict[int, str] = {}
        """The base URI of relative references in a resource, by the resource's `id()`."""
        self._anchors: dict[tuple[int, str], Any] = {}
        """The schemas with an anchor, by the `id()` of their resource and the name of the anchor."""
        self._homes: dict[int, Any] = {}
        """The resource that contains each schema, by the schema's `id()`."""
        self._names: dict[int, str] = {}
        """The names of definitions, by the `id()` of the original schema."""
        self._definitions: dict[str, Schema] = {}
        self._pending: list[tuple[str, Any, Any]] = []
        self._one_ofs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Pairs of a normalised schema with `oneOf` and its original."""
        self._index(root, root, "", MAX_DEPTH)

    def whole(self) -> dict[str, Any]:
        """Return the normalised root, with all definitions that it refers to."""
        root = self._schema(self._root, self._root)
        while self._pending:
            name, target, resource = self._pending.pop()
            self._path = [f"$defs/{name}"]
            self._definitions[name] = self._schema(target, resource)
        for definition in self._definitions.values():
            self._without_lone_ref(definition)
        for schema, original in self._one_ofs:
            if not Alternatives(self._definitions).prove(schema):
                error = NotEnforced("oneOf: its alternatives are not known to exclude one another; use anyOf", "oneOf")
                error.schema = original
                raise error
        root = self._without_lone_ref(root)
        if not isinstance(root, dict):
            raise SchemaRefused("no value can match it")
        return {**root, "$defs": self._definitions} if self._definitions else root

    def _without_lone_ref(self, schema: Schema) -> Schema:
        """Replace a schema that is only a reference by its definition. Readers of the result look for `properties`."""
        for _ in range(len(self._definitions) + 1):
            if not isinstance(schema, dict) or "$ref" not in schema or not set(schema) <= {"$ref", "type"}:
                return schema
            target = self._definitions[name_of(schema)]
            if "type" in schema and (not isinstance(target, dict) or schema["type"] != target.get("type")):
                return schema
            schema = target
        raise SchemaRefused("$ref: it refers to itself alone")

    def _index(self, value: Any, resource: Any, base: str, depth: int) -> None:
        """Record the identifiers and anchors of a value and of all values in it."""
        if not depth:
            raise SchemaRefused(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            for each in value:
                self._index(each, resource, base, depth - 1)
        if not isinstance(value, dict):
            return
        own = self._id_of(value)
        if own and not own.startswith("#"):
            resource, base = value, urljoin(base, own).rstrip("#")
            self._bases[id(value)] = base
            self._resources.setdefault(own.rstrip("#"), value)
            self._resources[base] = value
        for anchor in (value.get("$anchor"), value.get("$dynamicAnchor"), own[1:] if own.startswith("#") else None):
            if isinstance(anchor, str):
                self._anchors[id(resource), anchor] = value
        self._homes[id(value)] = resource
        for key, each in value.items():
            if key not in NO_SCHEMAS:
                self._index(each, resource, base, depth - 1)

    def _id_of(self, schema: Mapping[str, Any]) -> str:
        found = schema.get(self._id)
        return found if isinstance(found, str) and not (self._lone_refs and "$ref" in schema) else ""

    # ------------------------------------------------------------ references

    def _target(self, ref: Any, resource: Any) -> Any:
        """Return the schema to which a reference points."""
        if not isinstance(ref, str):
            raise self._refused("$ref must be a string")
        uri, _, fragment = ref.partition("#")
        if uri:
            there = urljoin(self._bases.get(id(resource), ""), uri)
            found = self._resources.get(there, self._resources.get(uri))
            if found is None:
                raise self._refused(f"$ref: {_short(ref)} is not in the schema, and nothing is fetched")
            resource = found
        fragment = unquote(fragment)
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            if (id(resource), fragment) in self._anchors:
                return self._anchors[id(resource), fragment]
            raise self._refused(f"$ref: {_short(ref)} does not exist")
        found = resource
        for part in fragment[1:].split("/") if fragment != "/" else ():  # "#/" is a common misspelling of "#"
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key[:9]) < len(found):
                found = found[int(key[:9])]
            else:
                raise self._refused(f"$ref: {_short(ref)} does not exist")
        return found

    def _refer(self, ref: Any, resource: Any) -> Schema:
        target = self._target(ref, resource)
        if isinstance(target, bool) or not isinstance(target, dict):
            return self._schema(target, resource)
        name = self._names.get(id(target))
        if name is None:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", str(ref).rstrip("/#").rpartition("/")[2])[:64] or "root"
            if name in self._definitions:
                name = f"{name}-{len(self._definitions)}"
            self._names[id(target)] = name
            self._definitions[name] = {}  # reserves the name; `whole` reads the definition later
            self._pending.append((name, target, self._homes.get(id(target), resource)))
        return {"$ref": f"#/$defs/{name}"}

    def _followed(self, schema: Any, resource: Any) -> tuple[Any, Any]:
        """Return the schema at the end of a chain of references, and its resource."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema or set(schema) & KNOWN != {"$ref"}:
                return schema, resource
            schema = self._target(schema["$ref"], resource)
            resource = self._homes.get(id(schema), resource) if isinstance(schema, dict) else resource
        raise self._refused("$ref: it refers to itself alone")

    # ------------------------------------------------------------ schemas

    def _refused(self, reason: str) -> SchemaRefused:
        place = "/".join(self._path)
        return SchemaRefused(f"{reason} (at #/{_short(place)})" if place else reason)

    def _cannot(self, keyword: str, reason: str = "") -> NotEnforced:
        """Return the error for an unenforceable keyword of the current schema.

        `reason` describes the keyword further.
        """
        return NotEnforced(str(self._refused(f"{keyword}{reason} is not served")), keyword)

    def _probe(self, schema: Any, resource: Any, keyword: str, *path: str) -> Schema:
        """Return the normalised subschema on which `keyword` depends.

        Raise NotEnforced for `keyword` if it is not enforceable.
        """
        depth = len(self._path)
        try:
            return self._child(schema, resource, keyword, *path)
        except NotEnforced:
            # A weaker subschema could make the whole schema stricter, so the whole keyword is left out.
            del self._path[depth:]
            raise self._cannot(keyword) from None

    def _child(self, schema: Any, resource: Any, *path: str) -> Schema:
        self._path += path
        found = self._schema(schema, resource)
        del self._path[len(self._path) - len(path) :]
        return found

    def _schema(self, schema: Any, resource: Any) -> Schema:
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, Mapping):
            raise self._refused("a schema must be an object or a boolean")
        if len(self._path) > MAX_DEPTH:
            raise SchemaRefused(f"it is nested deeper than {MAX_DEPTH} levels")
        resource = self._homes.get(id(schema), resource)
        draft = schema.get("$schema")
        if draft is not None and not (isinstance(draft, str) and DRAFT.fullmatch(draft)):
            raise self._refused(f"$schema: {_short(str(draft))} is none of JSON Schema's drafts 4 to 2020-12")
        try:
            return self._keywords(schema, resource)
        except NotEnforced as error:
            if error.schema is None and isinstance(schema, dict):
                error.schema = schema
            raise

    def _keywords(self, schema: Mapping[str, Any], resource: Any) -> Schema:
        kinds = self._kinds(schema.get("type"))
        own = {key: value for key, value in schema.items() if key in KNOWN and TYPE_OF.get(key, "") in kinds}
        self._values(own)
        self._sizes(own)
        self._numbers(own)
        self._conditions(own, resource)
        self._array(own, resource)
        self._object(own, resource)
        self._names_of_properties(own, resource)
        found = self._contents(own, resource)
        if found is False:
            return False
        for keyword in found:
            if keyword not in KEPT:
                raise self._cannot(keyword)
        if "oneOf" in found:
            self._one_ofs.append((found, cast("dict[str, Any]", schema)))
        return found["allOf"][0] if set(found) == {"allOf"} and len(found["allOf"]) == 1 else found

    def _kinds(self, named: Any) -> frozenset[str]:
        """Return the types whose keywords have an effect, and "" for keywords that apply to every type."""
        if named is None:
            return TYPES | {""}
        kinds = [named] if isinstance(named, str) else named
        if not isinstance(kinds, list):
            raise self._refused("type must be a string, or a list of strings")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in {*TYPES, "integer"}:
                raise self._refused(f"Invalid type: {_short(str(kind))}")
        return frozenset("number" if kind == "integer" else kind for kind in kinds) | {""}

    def _sizes(self, own: dict[str, Any]) -> None:
        """Write integral floats as integers, and drop lower bounds of 0."""
        for key in [key for key in own if key.startswith(("min", "max")) and key.endswith(SIZES)]:
            value = own[key]
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if not whole or isinstance(value, bool) or value < 0:
                raise self._refused(f"{key} must be a whole number of 0 or more, not {_short(str(value))}")
            own[key] = min(int(value), MAX_SIZE)
            if key in ("minLength", "minItems", "minProperties") and not value:
                del own[key]

    def _numbers(self, own: dict[str, Any]) -> None:
        """Move a bound beyond the exact numbers to the last exact one inside it, since the library cannot write it."""
        for key, sign in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", -1), ("exclusiveMaximum", 1)):
            value = own.get(key)
            if value is None or isinstance(value, bool):  # draft 4 has booleans here, which the library reads
                continue
            if not isinstance(value, int | float):
                raise self._refused(f"{key} must be a number")
            if value * sign > MAX_EXACT:
                own[key] = sign * MAX_EXACT
            elif value * sign < -MAX_EXACT:
                raise self._refused(f"{key}: numbers beyond 2**53 cannot be enforced")

    def _values(self, own: dict[str, Any]) -> None:
        """Replace `const` by an `enum` of one value, and drop unenforced formats and empty lists."""
        values = self._list(own, "enum")
        if "const" in own:
            const = own.pop("const")
            own["enum"] = [each for each in values if same(each, const)] if "enum" in own else [const]
        if any(abs(value) > MAX_EXACT + 1 for value in _numbers_in(own.get("enum"), MAX_DEPTH)):
            raise self._refused("numbers beyond 2**53 cannot be enforced")
        if not isinstance(own.get("format", ""), str):
            raise self._refused("format must be a string")
        if own.get("format") not in FORMATS:
            own.pop("format", None)
        if "allOf" in own:  # other keywords depend on its presence
            own["allOf"] = [] if all(map(_asks_nothing, self._list(own, "allOf"))) else own["allOf"]
        for key, empty in (("required", []), ("allOf", []), ("patternProperties", {})):
            if own.get(key) == empty:
                del own[key]

    def _conditions(self, own: dict[str, Any], resource: Any) -> None:
        """Resolve an `if` whose result is known or has no effect, and a `not` of a schema for all values or none."""
        condition = own.pop("if", None)
        branches: dict[str, Schema] = {
            key: self._child(own.pop(key), resource, key) for key in ("then", "else") if key in own
        }
        if condition is not None and any(branch != {} for branch in branches.values()):
            decided = self._probe(condition, resource, "if")
            if decided and decided != {}:
                raise self._cannot("if")
            branch = "else" if decided is False else "then"
            own["allOf"] = [*self._list(own, "allOf"), _Normalised(branches.get(branch, {}))]
        if "not" in own:
            denied = self._probe(own.pop("not"), resource, "not")
            if denied is not False:
                if denied != {}:
                    raise self._cannot("not")
                own["allOf"] = [*self._list(own, "allOf"), False]

    def _list(self, own: Mapping[str, Any], key: str) -> list[Any]:
        found = own.get(key, [])
        if not isinstance(found, list):
            raise self._refused(f"{key} must be a list")
        return found

    def _array(self, own: dict[str, Any], resource: Any) -> None:
        more = own.pop("additionalItems", None)
        if isinstance(own.get("items"), list):  # drafts up to 2019-09
            own["prefixItems"] = own.pop("items")
            if more is not None:
                own["items"] = more
        if not self._list(own, "prefixItems"):
            own.pop("prefixItems", None)
        unique = own.pop("uniqueItems", False)
        if not isinstance(unique, bool):
            raise self._refused("uniqueItems must be a boolean")
        if unique and own.get("maxItems", 2) > 1:
            raise self._cannot("uniqueItems", ": true")
        self._contains(own, resource)
        self._unevaluated(own, resource, "unevaluatedItems", "items")

    def _contains(self, own: dict[str, Any], resource: Any) -> None:
        least, most = own.pop("minContains", 1), own.pop("maxContains", None)
        if "contains" not in own:
            return
        wanted = own.pop("contains")
        if most is None and not least:
            return
        if self._probe(wanted, resource, "contains") != {}:
            raise self._cannot("contains")
        own["minItems"] = max(own.get("minItems", 0), least)
        if most is not None:
            own["maxItems"] = min(own.get("maxItems", most), most)

    def _object(self, own: dict[str, Any], resource: Any) -> None:
        required = self._required(own, resource)
        if own.get("minProperties", 0) <= len(required):
            own.pop("minProperties", None)
        elif own["minProperties"] > len(required) + 1:
            # The library allows an unlisted name twice, so it cannot count distinct names.
            raise self._cannot("minProperties", " of more than one beyond those required")
        self._unevaluated(own, resource, "unevaluatedProperties", "additionalProperties")

    def _unevaluated(self, own: dict[str, Any], resource: Any, keyword: str, others: str) -> None:
        """Replace `keyword` by `others`, which is equivalent if no other subschema applies to the same value."""
        if keyword not in own:
            return
        rest = own.pop(keyword)
        if others not in own:
            if any(key in own for key in IN_PLACE) and self._probe(rest, resource, keyword) != {}:
                raise self._cannot(keyword)
            own[others] = rest

    def _required(self, own: dict[str, Any], resource: Any) -> set[str]:
        """Return the names of required properties, including those that other required ones depend on."""
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise self._refused("required must be a list of strings")
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            wanted = own.pop(keyword, {})
            if not isinstance(wanted, dict):
                raise self._refused(f"{keyword} must be an object")
            for key, needed in wanted.items():
                if isinstance(needed, list):
                    if not all(isinstance(each, str) for each in needed):
                        raise self._refused(f"{keyword} must list strings")
                    if key in required:
                        required = own["required"] = [*required, *needed]
                    elif not set(needed) <= {key, *required}:
                        raise self._cannot(keyword)
                elif self._probe(needed, resource, keyword, key) != {}:
                    raise self._cannot(keyword)
        return set(required)

    def _names_of_properties(self, own: dict[str, Any], resource: Any) -> None:
        """Convert `propertyNames` to properties or to a pattern. Drop a rule that constrains no name."""
        if "propertyNames" not in own:
            return
        names = self._probe(*self._followed(own.pop("propertyNames"), resource), "propertyNames")
        if names is False or (isinstance(names, dict) and "string" not in types_of(names)):
            own["maxProperties"] = 0
            return
        assert isinstance(names, dict)
        rules = {key: value for key, value in names.items() if TYPE_OF.get(key, "string") == "string"}
        for ignored in ("type", "format"):
            rules.pop(ignored, None)
        if not rules:
            return
        more, known = own.get("additionalProperties", True), own.get("properties", {})
        if "patternProperties" in own or not isinstance(known, dict):
            raise self._cannot("propertyNames", " beside patternProperties")
        if set(rules) == {"enum"}:
            allowed = [name for name in rules["enum"] if isinstance(name, str)]
            own["properties"] = {
                **{name: schema if name in allowed else False for name, schema in known.items()},
                **{name: more for name in allowed if name not in known},
            }
        elif known or not (set(rules) == {"pattern"} or set(rules) <= {"minLength", "maxLength"}):
            raise self._cannot("propertyNames", " of more than a pattern, a length or names")
        else:
            length = rf"^[\s\S]{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}}$"
            own["patternProperties"] = {str(rules.get("pattern", length)): more}
        own["additionalProperties"] = False

    def _contents(self, own: dict[str, Any], resource: Any) -> dict[str, Any] | Literal[False]:
        """Return the keywords with all subschemas normalised; False if the schema has no instance."""
        found: dict[str, Any] = {}
        for key, value in own.items():
            if key in ("allOf", "anyOf", "oneOf"):
                if not self._alternatives(found, key, self._list(own, key), resource):
                    return False
            elif key in ("$ref", "$recursiveRef"):
                if key == "$recursiveRef" and value != "#":
                    raise self._cannot(key)
                read = self._refer(value, resource)
                if read is False:
                    return False
                found |= read if isinstance(read, dict) else {}
            elif key in ("properties", "patternProperties"):
                if not isinstance(value, dict):
                    raise self._refused(f"{key} must be an object")
                if value:
                    found[key] = {name: self._child(each, resource, key, name) for name, each in value.items()}
            elif key == "prefixItems":
                found[key] = [self._child(each, resource, key, str(at)) for at, each in enumerate(value)]
            elif key not in ("items", "additionalProperties"):
                found[key] = value
            elif (read := self._child(value, resource, key)) != {}:
                found[key] = read
        return found if found.get("enum", True) else False

    def _alternatives(self, found: dict[str, Any], key: str, listed: Sequence[Any], resource: Any) -> bool:
        """Add `allOf`, `anyOf` or `oneOf` to `found`. Return False if no value can match."""
        if not listed:
            if key == "allOf":
                return True
            raise self._refused(f"{key} is empty")
        read = [
            each.schema if isinstance(each, _Normalised) else self._child(each, resource, key, str(at))
            for at, each in enumerate(listed)
        ]
        if key == "allOf":
            if False in read:
                return False
            found[key] = [*found.get(key, []), *(each for each in read if each != {})]
        else:
            possible = [each for each in read if each is not False]
            if not possible:
                return False
            if len(possible) == 1:
                found["allOf"] = [*found.get("allOf", []), *(each for each in possible if each != {})]
            elif key == "oneOf" or {} not in possible:
                found[key] = possible
        if not found.get("allOf", True):
            del found["allOf"]
        return True


class _Normalised:
    """A schema in a list that is already normalised."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema


def _asks_nothing(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not schema.keys() & KNOWN)


def _numbers_in(value: Any, depth: int) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict) and depth:
        for each in value if isinstance(value, list) else value.values():
            yield from _numbers_in(each, depth - 1)


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
