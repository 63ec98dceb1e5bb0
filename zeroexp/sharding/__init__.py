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

With replicas N is the size of a group of ranks, and what its ranks have summed is summed between groups in the last
microbatch (zeroexp/comm/replicas.py). Nothing else changes.

The drawing shows what each of two ranks holds after backward (# held, . not held; the optimizer has two moments):

                 zero1                  zero2                  zero3
    rank 0       P ########  G ########  P ########  G ####....  P ####....  G ####....
                 O ####....              O ####....              O ####....
    rank 1       P ########  G ########  P ########  G ....####  P ....####  G ....####
                 O ....####              O ....####              O ....####

Read zeroexp/cut/ first, then the files with a star: they are the algorithm. Imports run in the order of this list.

    dtypes.py           names the dtypes of parameters, gradients and masters
    options.py          settles what the caller leaves open: bucket size, prefetch depth, when to reduce
    grouping.py         decides which parameters of a module move together
    guard.py            keeps parameters from being misread: freed ones raise, a root let go is gathered again
                        (tensor_functions.py says which uses need their values)
    state.py *          says what memory a rank holds of one chunk: piece, gathered parameters, masters
    gradients.py        takes one chunk's gradients from autograd to the optimizer
    unit.py *           moves a set of parameters together: the five verbs
    assemble.py         makes units
    saved.py            finds what autograd saved of gathered parameters
    gathers.py *        gathers units when they are needed, and ahead as gather_order.py remembers; frees them
    reductions.py       starts the reductions of gradients in an order that all ranks agree on
    closing.py          tells the backward that ends the use of units from others
    schedule.py *       turns what happens in a module into verbs; hooks.py tells it what happens
    gathered.py         shows every parameter whole
    gradient_norm.py    sums over ranks, before a step: the norm, and who has a gradient
    same_start.py       lets ranks start with the same settings and weights
    state_dict.py       converts weights and moments to canonical pieces and back
    engine.py *         runs microbatch, backward and step: the verbs in their order
    observer.py         names the events that the engine tells; refusals/ is the observer, which raises where code
                        around the engine would train another model without a word

Bytes move in `zeroexp/comm/`; `zeroexp/plan/closed_forms.py` predicts what a step sends and holds.
"""
