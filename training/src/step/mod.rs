//! The graph of a training step, split over the processes of a job.
//!
//! ```text
//!  parameter server (part W of W + 1)                 worker w (parts 0 to W − 1)
//!    assign.v ───────────────────────────────────────▶ forward.1@w … forward.n@w ─▶ loss@w
//!    push.v ◀──────────────────────────────────────── backward.n@w … backward.1@w ◀──┘
//!
//!  allreduce (W parts)
//!    each worker has its own assign.v@w and push.v@w, and the gradients go round the ring of workers in between
//! ```
//!
//! The forward and the backward pass go layer by layer, so a gradient crosses while those of the layers below are computed. The variables
//! are in [`Variables`]: the assign nodes of a step apply the gradients of the step before.
//!
//! Every process builds the whole graph, and the kernels of its own part.

mod build;
mod builder;
mod embedding;
mod gradient;
mod kernels;
mod pictures;
mod recurrent;
mod ring;
mod server;
mod shape;
#[cfg(test)]
mod tests;

pub(crate) use build::StepGraph;
pub(crate) use recurrent::test as test_recurrent;
pub(crate) use shape::{Feed, Model, Recurrent, Shape, Synchrony};
