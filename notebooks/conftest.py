"""For `pytest --nbval notebooks`: what a cell writes to standard error, such as a warning that is new in a library, is
not compared.  An exception fails all the same."""


def pytest_collection_modifyitems(items):
    for notebook in {item.parent for item in items if hasattr(item.parent, "skip_compare")}:
        notebook.skip_compare = (*notebook.skip_compare, "stderr")
