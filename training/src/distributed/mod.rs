//! Training through the graphs of `tonic-rdma-graph`: several processes run one graph, in one mode of transfer after the other.
//!
//! ```text
//!  outcome      what comes out
//!  coordinator  starts the processes, tells them what to do, compares what they report
//!  parts        the processes
//!  process      one part: carries out the commands of the coordinator
//!  trainer      one part in one mode: the executor, and what is fed
//!  messages     what coordinator and parts say to each other: a line of JSON each
//! ```

mod coordinator;
mod messages;
mod outcome;
mod parts;
mod process;
pub(crate) mod trainer;

pub(crate) use coordinator::run;
pub(crate) use outcome::{figure, text};
pub(crate) use process::serve;
