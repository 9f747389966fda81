"""``grpoflow plan``: does a recipe fit on so many GPUs, how long does a step take, what does a day leave on disk?

``shapes`` counts parameters, ``memory`` and ``pace`` are arithmetic on a recipe, ``show`` puts it into lines. Nothing
here loads a model; torch is imported only to measure this machine's rates.
"""
