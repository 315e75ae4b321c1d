"""Summary after the comparison with JAX: counts, worst errors, differences."""


def pytest_terminal_summary(terminalreporter):
    # properties travel with the reports, also from the workers of xdist, where tuples become lists
    found = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for key, value in getattr(report, "user_properties", ())
        if key == "peer"
    ]
    if not found:
        return
    write = terminalreporter.write_line
    names = {name for name, *_ in found}
    write("")
    write(f"{len(names)} functions and compositions agree with JAX in values and derivatives. Worst errors:")
    for dtype in sorted({d for _, d, *_ in found}):
        ranked = sorted(((e, n) for n, d, e, _ in found if d == dtype), reverse=True)[:5]
        write(f"  {dtype}: " + ", ".join(f"{e:.1e} {n}" for e, n in ranked))
    differ = {}
    for name, _, _, reasons in found:
        for reason in reasons:
            differ.setdefault(reason, set()).add(name)
    write(f"{len(set().union(*differ.values()))} differ in part:" if differ else "None differ.")
    for reason, rows in sorted(differ.items()):
        write(f"  {reason}: {', '.join(sorted(rows))}")
