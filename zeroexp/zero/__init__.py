"""ZeRO, written by hand: one engine runs every stage, and a stage is a row of three placements.

Compute needs parameters *replicated*; backward leaves gradients *partial*, a summand on every rank; the optimizer needs
gradient and weight *where its state rests*. P, G, O say where parameters, gradients and optimizer state rest between
uses. Every collective takes a tensor from where it rests to where it is needed next:

    moment          verb       change          ddp         zero1_      zero1        zero2        zero3
                                                           allreduce
                                               R,R,R       R,R,S       R,partial,S  R,S,S        S,S,S
    before use *    gather     P -> replicate  -           -           -            -            all-gather
    after use *     free       replicate -> P  -           -           -            -            drop
    gradients ready reduce     partial -> G    all-reduce  all-reduce  -            red.-scatter red.-scatter
    before step **  hand_over  G -> O          -           own slice   red.-scatter -            -
    optimizer step  (torch's)  on its pieces   all         1/N         1/N          1/N          1/N
    after step      publish    O -> P          -           all-gather  all-gather   all-gather   -
    bytes sent, x P (N-1)/N                    2           3           2            2            3

    *  in forward, and again in backward
    ** zero1's reduce-scatter is begun by `reduce`, beside the last microbatch's backward

Every reduction is a sum: the training loop has divided the loss by the number of all ranks' labels
(interface/strategy.py, [Note: who divides]).

With a secondary copy in each node (hpZ, zeroexp/comm/secondary.py) the gathers of a unit in a step, but for the first,
stay inside of a node of G ranks: 2 P (N-1)/N are sent over all ranks, and P (G-1)/G there.

With replicas N is the size of a group of ranks, and what its ranks have summed is summed between groups in the last
microbatch (zeroexp/comm/replicas.py), or the weights' changes once in several steps (outer.py). The optimizer alone
may rest over all ranks; then that sum is a reduce-scatter, and an all-gather between groups begins publish.

The drawing shows what each of two ranks holds after backward (# held, . not held; the optimizer has two moments):

                 zero1                  zero2                  zero3
    rank 0       P ########  G ########  P ########  G ####....  P ####....  G ####....
                 O ####....              O ####....              O ####....
    rank 1       P ########  G ########  P ########  G ....####  P ....####  G ....####
                 O ....####              O ....####              O ....####

Read zeroexp/cut/ first, then the files with a star: they are the algorithm. Imports run in the order of this list;
options.py is to be looked up. In all of them `wire` is what moves bytes (comm/collectives.py), in the `group` of ranks
that shard among themselves; `holders` are the ranks with the same pieces, one of each group, `stepping` those that take
a step together, `twins` those that update the same elements, and the `bus` runs between a device and its host.

    options.py          dtypes of parameters, gradients and masters; how a stage is carried out
    grouping.py         which parameters of a module move together
    held.py *           what memory a rank holds of one chunk: piece, gathered parameters, masters
    full_storage.py     the one storage of a unit's gathered parameters, empty while they are freed
    gradients.py        one chunk's gradients, from autograd to the optimizer
    unit.py *           what moves together: the five verbs
    observer.py         events of the engine; zero_safety/ is an observer, which raises where code around the engine
                        would train another model without a word
    assemble.py         ranks start alike; units are cut and filled
    backward_task.py    which backward runs
    gathers.py          units are gathered when they are needed, and ahead in the order of the microbatch before; freed
    schedule.py *       events in a module, by hooks, become verbs, in an order that all ranks agree on
    saved_views.py      what autograd saves of gathered parameters
    casts.py            modules that compute in a dtype of their own: what goes in and comes out is cast
    gathered_parameters.py
                        a block of code that sees every parameter whole, as FSDP's summon_full_params
    step_sums.py        the sum over ranks before a step: norm of the gradients, and who has one
    matrices.py         matrices of which ranks hold pieces, brought together while an optimizer needs them whole
    outer.py            replicas that are seldom synchronised: the outer optimizer of DiLoCo
    engine.py *         microbatch, backward and step: the verbs in their order; states, and back

Bytes move in `zeroexp/comm/`; `zeroexp/plan/held_bytes.py` and `sent_bytes.py` predict them.
"""
