//! Training through the graphs of `tonic-rdma-graph`: several processes run one graph, in one mode of
//! transfer after the other.
//!
//! ```text
//!  outcome      what comes out
//!  coordinator  starts the processes, tells them what to do, compares what they report, tests, writes checkpoints
//!  parts        the processes, and what coordinator and parts say to each other: a line of JSON each
//!  process      one part: carries out the commands of the coordinator, with a trainer for each mode: the executor, and what is fed
//! ```

mod coordinator;
mod outcome;
mod parts;
pub(crate) mod process;

pub(crate) use coordinator::run;
pub(crate) use outcome::{figure, text};
pub(crate) use process::serve;
