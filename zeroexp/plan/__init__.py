"""A plan computes what a run will cost before it runs: `zeroexp plan` with the words of the run.

What rests and what is sent
    form_terms.py                             what a closed form is made of: precision, optimizer, elements
    held_bytes.py, sent_bytes.py              of our engine
    torch_closed_forms.py, deepspeed_closed_form.py    of others
    form_of_config.py, machines.py            of a configured point; the machines it is planned for
    module_uses.py                            how often a forward uses each of its modules
    outcome.py                                what all ranks hold and send; of a run that was measured too
The peak and the seconds: the real engine as one rank, on tensors without memory
    rehearse.py, peak.py                      how; the peak of a planned point
    storages.py, hidden_memory.py             what lives when; what fake tensors do not show
    caching_allocator.py                      what torch's allocator reserves of a GPU for it
    stand_ins.py                              peers, reducer and samples
    speed.py, timing.py                       how fast a rank and its links are; the seconds of a rehearsed step
Answers
    __main__.py, composed_points.py, plan_points.py    the command; the points of its line, refused or planned
    plan_table.py                             what they hold and send
    changes.py                                a point with other settings, planned
    fit.py, advise.py, explain_plan.py        --fit, --advise, --explain
    advice_text.py, text_table.py             the advice in words; tables and sentences of all answers
"""
