"""House rules that a linter does not know, as ordinary tests."""

import ast
import re
from functools import cache
from pathlib import Path

from gpuops.checks import NAMES

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "gpuops").rglob("*.py"))
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
MANUAL_LINES_MAX = 40
# Every check has limits of its own, by the same name.
PER_CHECK = {"Parameters"}
BROAD = {"Exception", "BaseException"}

# Words of an earlier private language. Fields of formats that exist keep theirs: a drain's record
# ("doubted"), a status of checkpoints ("told"), the text of a service ("said"), tables ("told_by").
RETIRED = {"told", "said", "heard", "seat", "seats", "seated", "chronicle", "wish", "wishes"}
RETIRED |= {"usher", "sight", "doubt", "doubts", "crew", "errand", "deed", "shelf", "rung", "looks"}
IN_FORMATS = {"told", "told_by", "said"}

# The one reader of the environment, and a training script that could be anybody's.
READS_ENVIRON = {"gpuops/config/resolve.py", "gpuops/demo/train.py"}
# Processes are started by the host layer, and by the tour that types commands as a user would.
# The second is a process of its own, whose child the kernel ends with it.
STARTS_PROCESSES = {"gpuops/demo/scenario.py", "gpuops/control/etcd/member.py"}


assert len(MODULES) > 100, "the rules below would hold of nothing"


def name(path):
    return path.relative_to(ROOT).as_posix()


def n_lines(path):
    return sum(1 for line in path.read_text().splitlines() if line.strip())


@cache
def tree(path):
    return ast.parse(path.read_text())


def nodes(path, *kinds):
    return [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]


def test_a_module_has_one_idea():
    vague = {"utils", "helpers", "common", "misc", "manager"}

    assert [name(p) for p in MODULES if p.stem in vague] == []
    assert {name(p): n for p in MODULES if (n := n_lines(p)) > MODULE_LINES_MAX} == {}


def test_functions_fit_on_a_screen():
    too_long = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.end_lineno - node.body[0].lineno + 1 > FUNCTION_LINES_MAX
    ]

    assert too_long == []


def test_only_config_reads_the_environment():
    reads = [
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        if name(path) not in READS_ENVIRON
        for node in nodes(path, ast.Attribute)
        if ast.unparse(node) in {"os.environ", "os.getenv"}
    ]

    assert reads == []


def test_only_the_host_starts_processes():
    starts = []
    for path in MODULES:
        if name(path).startswith("gpuops/host/") or name(path) in STARTS_PROCESSES:
            continue
        imported = {alias.name for node in nodes(path, ast.Import) for alias in node.names}
        imported |= {node.module for node in nodes(path, ast.ImportFrom)}
        if "subprocess" in imported:
            starts.append(name(path))

    assert starts == []


def starts_python(node):
    """Whether the display *node* begins with this interpreter."""
    return bool(node.elts) and ast.unparse(node.elts[0]) == "sys.executable"


def test_what_is_started_with_python_m_imports_nothing_from_its_folder():
    by_the_user = "[sys.executable, *sys.orig_argv[1:]]"  # the same words once more
    unsafe = [
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        for node in nodes(path, ast.List, ast.Tuple)
        if starts_python(node)
        and not ast.unparse(node).replace("(", "[").startswith("[sys.executable, '-P', '-m', ")
        and ast.unparse(node) != by_the_user
    ]
    scripts = [path for path in (ROOT / "slurm").rglob("*") if path.is_file()]
    unsafe += [
        name(path) for path in scripts if re.search(r"python\S* (?!-P)-m gpuops", path.read_text())
    ]

    assert unsafe == []
    assert len(scripts) >= 4


def test_nobody_is_told_to_install_another_project_of_our_name():
    """On the public package index, gpuops is somebody else's."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "runbooks").glob("*.md"), *ROOT.glob("*.md")]
    pages += [path for path in (ROOT / "slurm").rglob("*") if path.is_file()]
    named = re.compile(
        r"(pip3? install|uv add|uv tool install|pipx install)\b[^\n]*[ '\"=]gpuops\b"
    )

    assert [name(path) for path in [*MODULES, *pages] if named.search(path.read_text())] == []


def test_no_process_is_started_through_a_shell():
    words = ("shell=True", "os.system(")

    assert [name(p) for p in MODULES if any(w in p.read_text() for w in words)] == []


def test_a_broad_except_says_what_boundary_it_guards():
    unexplained = []
    for path in MODULES:
        source = path.read_text().splitlines()
        for handler in nodes(path, ast.ExceptHandler):
            caught = {ast.unparse(n) for n in ast.walk(handler.type)} if handler.type else BROAD
            if caught & BROAD and "boundary:" not in source[handler.lineno - 1]:
                unexplained.append(f"{name(path)}:{handler.lineno}")

    assert unexplained == []


def test_nothing_unpickles():
    for path in MODULES:
        for word in ("import pickle", "import marshal", "import shelve", "eval(", "exec("):
            assert word not in path.read_text().replace("literal_eval(", ""), f"{word} in {path}"


def test_every_check_module_is_listed_has_its_test_and_its_line_in_a_suite():
    suites = "".join(p.read_text() for p in (ROOT / "checks" / "suites").glob("*.toml"))
    package = ROOT / "gpuops" / "checks"
    checks = [p.stem for p in package.rglob("*.py") if "\nCHECK = Check(" in p.read_text()]

    assert sorted(checks) == sorted(NAMES)
    for check in checks:
        assert f'name = "{check}"' in suites
        assert (ROOT / "tests" / "unit" / "checks" / f"test_{check}.py").exists()


def test_a_public_class_name_means_one_thing():
    found = {}
    for path in MODULES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name(path))
    assert len(found) > 500

    assert {key: paths for key, paths in found.items() if len(paths) > 1}.keys() <= PER_CHECK


def test_no_module_imports_a_private_name_of_another():
    private = [
        f"{name(path)}: {alias.name}"
        for path in MODULES
        for node in nodes(path, ast.ImportFrom)
        for alias in node.names
        if (node.module or "").startswith("gpuops")
        and alias.name.startswith("_")
        and not alias.name.startswith("__")
    ]

    assert private == []


def test_names_are_words_of_the_field():
    kinds = (ast.FunctionDef, ast.ClassDef, ast.arg, ast.Name, ast.Attribute)
    retired = {
        f"{name(path)}: {found}"
        for path in MODULES
        for node in nodes(path, *kinds)
        for found in [_bound_name(node)]
        if found not in IN_FORMATS and RETIRED & set(re.findall("[a-z]+", found.lower()))
    }

    assert sorted(retired) == []


def _bound_name(node):
    """Return the name that *node* defines or assigns, an empty one where it only reads."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if not isinstance(node.ctx, ast.Store):
        return ""
    return node.id if isinstance(node, ast.Name) else node.attr


def test_callbacks_are_given_to_constructors():
    """None is set on an object that already exists: its class says whom it calls."""
    set_later = [
        f"{name(path)}:{node.lineno} {ast.unparse(target)}"
        for path in MODULES
        for node in nodes(path, ast.Assign, ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
        and ast.unparse(target.value) != "self"
        and (target.attr.startswith("on_") or isinstance(node.value, ast.Lambda))
    ]

    assert set_later == []


def test_every_package_says_what_it_is_for():
    for package in sorted({path.parent for path in MODULES}):
        text = ast.get_docstring(tree(package / "__init__.py")) or ""

        assert len(text) > len("gpuops." + package.name) + 10, f"{package} has no docstring"
        assert len(text.splitlines()) <= MANUAL_LINES_MAX, package


def test_the_data_folders_hold_no_python():
    for folder in ("checks", "runbooks", "slurm"):
        assert list((ROOT / folder).rglob("*.py")) == []
