def predicted(plan, runs):
    return []
