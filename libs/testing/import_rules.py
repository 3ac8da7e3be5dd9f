"""A rule for import-linter: a package imports only itself, the standard library, and a list of modules."""

import sys
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyContract(Contract):
    """`type = "only"`: `package` may import what is in it, the standard library and `allowed`."""

    type_name = "only"
    package = fields.StringField()
    allowed = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Check every import of the package, including those for types only."""
        del verbose
        package = str(self.package)
        own = {package, *graph.find_descendants(package)}
        allowed = sys.stdlib_module_names | set(cast("list[str]", self.allowed or []))
        found = {
            f"{module} imports {imported}"
            for module in own
            for imported in graph.find_modules_directly_imported_by(module)
            if imported not in own and imported.partition(".")[0] not in allowed
        }
        return ContractCheck(kept=not found, metadata={"found": sorted(found)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line for each forbidden import."""
        for line in check.metadata["found"]:
            output.print_error(line)
