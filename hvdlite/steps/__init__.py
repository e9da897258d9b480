"""
Other kinds of step than the plain average: after the optimizer's own step (Adasum), between hosts once in many steps
(`outer_steps`), and one that is finished although ranks are lost in it (`surviving_step`).

Modules import only what stands before them:

    kept_gradients < outer_bucket < outer_steps < step_deltas < surviving_step
"""
