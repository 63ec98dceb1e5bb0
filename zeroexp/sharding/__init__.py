"""ZeRO, written by hand. One engine; a stage is a row of three placements.

Compute needs parameters *replicated*; backward leaves gradients *partial*, a summand on every rank; the optimizer needs
gradient and weight *where its state rests*. P, G, O say where parameters, gradients and optimizer state rest between
uses. Every collective is what it takes to go from where a thing rests to where it is needed next:

    moment          verb       change          ddp         zero1_      zero1        zero2        zero3
                                                           allreduce
                                               R,R,R       R,R,S       R,partial,S  R,S,S        S,S,S
    before use *    gather     P -> replicate  -           -           -            -            all-gather
    after use *     free       replicate -> P  -           -           -            -            drop
    gradients ready reduce     partial -> G    all-reduce  all-reduce  -            red.-scatter red.-scatter
    before step     hand_over  G -> O          -           own slice   red.-scatter -            -
    optimizer step  (torch's)  on its pieces   all         1/N         1/N          1/N          1/N
    after step      publish    O -> P          -           all-gather  all-gather   all-gather   -
    bytes sent, x P (N-1)/N                    2           3           2            2            3

    * in forward, and again in backward

Who holds what after backward of two ranks (# held, . not held; the optimizer has two moments):

                 zero1                  zero2                  zero3
    rank 0       P ########  G ########  P ########  G ####....  P ####....  G ####....
                 O ####....              O ####....              O ####....
    rank 1       P ########  G ########  P ########  G ....####  P ....####  G ....####
                 O ....####              O ....####              O ....####

Read the files in this order; imports run the same way. Those with a star are the algorithm.

    placement.py *    where things rest, and the move from one place to the next: the table above     pure
    layout.py *       how parameters are cut: chunks, cuts, spans; by parameter, tensor or buffer     pure
    bucket.py         which gradients are reduced together                                            pure
    storage.py        the memory gathered parameters lie in
    guard.py          parameters that cannot be misread: freed ones raise, ones in flight are waited for
    gradients.py *    one chunk's gradients, from autograd to the optimizer; tied.py: of embedding and head in one
    unit.py *         parameters that move together: the five verbs
    partition.py      module -> units; housing.py: units -> memory for what they gather
    saved.py          what autograd saves of gathered parameters, found again; views.py: views that outlive them
    reductions.py     in which order gradients are reduced, beside backward
    schedule.py *     when each verb happens; prefetch.py: which unit comes next; calls.py: which call may come next
    hooks.py          what happens in a module, told to schedule.py
    gathered.py       every parameter whole, for whoever asks; unchanged.py: what somebody changed behind the engine
    tally.py          what ranks tell each other before a step: the norm, and which parameters have a gradient
    state_dict.py     weights and moments as canonical pieces
    door.py           what can not be trained soundly is refused
    engine.py *       microbatch, backward, step: the verbs in their order

Bytes move in `zeroexp/comm/`; what a step sends and holds is foretold in `zeroexp/plan/predict.py`.
"""
