"""
What a step of an optimizer is: `step` says what all kinds have in common, and `step_choice` makes one for a world.

    averaged_step    the average of gradients             outer_step      wraps it: between hosts once in many steps
    adasum_step      after the optimizer's own step       surviving_step  wraps it: finished although ranks are lost

Modules import only what stands before them:

    step_world < gradient_plan < step < averaged_step < adasum_step < outer_bucket < outer_step < surviving_step
        < step_choice
"""
