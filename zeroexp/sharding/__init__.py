"""This folder is ZeRO, written by hand: one engine runs every stage, and a stage is a row of three placements.

Compute needs parameters *replicated*; backward leaves gradients *partial*, a summand on every rank; the optimizer needs
gradient and weight *where its state rests*. P, G, O say where parameters, gradients and optimizer state rest between
uses. Every collective takes a tensor from where it rests to where it is needed next:

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

The drawing shows what each of two ranks holds after backward (# held, . not held; the optimizer has two moments):

                 zero1                  zero2                  zero3
    rank 0       P ########  G ########  P ########  G ####....  P ####....  G ####....
                 O ####....              O ####....              O ####....
    rank 1       P ########  G ########  P ########  G ....####  P ....####  G ....####
                 O ....####              O ....####              O ....####

Read the files in this order; imports run the same way. The files with a star are the algorithm.

    placement.py *    says where tensors rest and which move joins two placements: the table above    pure
    layout.py *       cuts parameters into chunks, cuts and spans; by parameter, tensor or buffer     pure
    bucket.py         decides which gradients are reduced together                                    pure
    pools.py          holds the memory in which gathered parameters lie
    guard.py          keeps parameters from being misread: freed ones raise, ones in flight are waited for
    gradients.py *    takes one chunk's gradients from autograd to the optimizer
    unit.py *         moves a set of parameters together: the five verbs
    partition.py      turns a module into units; pool_assignment.py: gives units the memory they gather into
    saved.py          finds what autograd saved of gathered parameters; views.py: refuses views that outlive them
    reductions.py     decides in which order gradients are reduced, beside backward
    schedule.py *     decides when each verb happens; prefetch.py: which unit comes next; calls.py: which call may come
    hooks.py          tells schedule.py what happens in a module
    gathered.py       shows every parameter whole; unchanged.py: notices what was changed behind the engine
    tally.py          sums what ranks tell each other before a step: the norm, and which parameters have a gradient
    state_dict.py     converts weights and moments to canonical pieces and back
    options.py        settles what the caller leaves open: bucket size, prefetch depth, when to reduce
    door.py           refuses what cannot be trained soundly
    engine.py *       runs microbatch, backward and step: the verbs in their order

Bytes move in `zeroexp/comm/`; `zeroexp/plan/predict.py` predicts what a step sends and holds.
"""
