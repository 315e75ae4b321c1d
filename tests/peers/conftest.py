"""After the comparison with JAX: how many functions were compared, the worst errors, and what differs and why."""


def pytest_terminal_summary(terminalreporter):
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
    reasons = {(name, reason) for name, _, _, reason in found if reason}
    write(f"{len(reasons)} differ in part:" if reasons else "None differ.")
    for name, reason in sorted(reasons):
        write(f"  {name}: {reason}")
