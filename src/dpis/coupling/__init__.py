"""Does the user's code couple records, write to the model, or depend on a record's neighbours?

The guarantee bounds what one record adds to a sum. It holds if the gradient of a record is made of this record, of
released values and of public numbers alone. Nobody can prove that of code that somebody else wrote, so it is tried out:
a probe does again what was done, with other neighbours and the same random numbers, and refuses what changes. Probes
take tensors, modules and functions, and are called by those who run them: `training`, `dropin`, `gradients`.

*Looks* are the 1st, 2nd, 4th, 8th, … occasion, counted by each probe for itself (`looks.Looks`): early, ever more
rarely, never for the last time. A look draws from no generator of the user's, and leaves no trace in a model.

| what is looked for                      | module           | when                           | cost of a look      |
|-----------------------------------------|------------------|--------------------------------|---------------------|
| rows named twice, or held out too       | shared_rows      | once, before training          | indices, addresses  |
| items made of others (``__getitems__``) | items            | looks, at batches              | 2 fetches           |
| rows made of others (``collate_fn``)    | items            | looks, until one shows         | 5 to 10 collations  |
| rows augmented with others              | items            | looks, until one shows         | 1 augmentation      |
| rows whose gradient depends on padding  | padding,         | looks, at batches; rows longer | 4 rows, 2 ways:     |
|                                         | padding_trials   | than any before                | collated, run       |
| layers that couple records by design    | forbidden_layers | every forward pass             | a walk over layers  |
| what a model writes to itself           | writes           | every step; frozen parameters  | 2 digests, of small |
|                                         |                  | by version, by digest at looks | tensors a copy      |
| losses or activations that move with    | neighbours       | when calls are planned: at the | 3 passes over       |
| another of three records                |                  | first batch, and at new calls  | 3 records           |
| records that changed places             | neighbours       | looks, at forward passes; in   | 1 pass, forward     |
|                                         |                  | chunks that are filled up      | and backward        |
| fast gradients that are not autograd's  | agreement        | looks, at forward passes       | 8 records, then 4   |
| means over unlike weights of the batch  | own_means,       | every call of such a loss, to  | none; where rows    |
|                                         | owners           | take a record's own instead    | moved, 3 backward   |
| rows of outputs that change places,     | picked_rows      | every call that moves rows     | none; where rows    |
| means over picked ones                  |                  |                                | moved, 3 backward   |
| divisors made of the batch              | divisors         | every scaling by a number,     | none                |
|                                         |                  | against those of other steps   |                     |
| penalties on weights, to be named       | weight_penalty   | every addition to a loss       | 1 backward          |
| losses of a loop that couple rows       | loss, loss_tape  | looks, at forward passes       | the loss 15 times   |
| what is trained beside the model        | outputs          | every call with an output      | a walk up the graph |

Batch normalisation and tables that look at the batch, called as functions, are refused by `gradients`.

What cannot be seen (docs/pitfalls.md says what to do instead):

- *Between two looks*: whatever begins to couple records there, until the next look.
- *Datasets*: copies of rows, and files that two datasets read; ``__getitem__`` that reads other records, the same
  every time; in ``__getitems__`` an item that takes from one before it.
- *Padding*: collate functions that draw random numbers for an item, and models that are random without dropout. A
  warning is given where inputs are not tensors of the batch as delivered, and where a row cannot be run by itself. A
  loss that masks and then divides by the padded length goes unseen.
- *Models*: writes after the step or in evaluation mode; records that couple in float32 and not in float64.
- *Losses*: what is made of labels or masks alone, but for divisors that change from step to step; class weights that
  are made of the records but the same in every step; numbers that Python took out of tensors (``.item()``, ``if``);
  pairs of rows without any kink; margins further away than ten times the largest output; what goes through
  ``torch.autograd.backward`` or ends in an ``autograd.Function``. Where a loss cannot be computed again, its second
  derivatives are asked, and a warning is given.
- *Beside the model*: what is trained on ``outputs.detach()``.

Whether the model is given what the loader delivered is another question, about the order of a loop: `dropin.delivered`.
"""
