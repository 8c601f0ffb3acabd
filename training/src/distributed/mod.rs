//! Training through the graphs of `tonic-rdma-graph`: several processes run one graph, in one mode of transfer after the other.
//!
//! ```text
//!  arguments    what the command line asks for
//!  outcome      what comes out
//!  coordinator  starts the processes, tells them what to do, compares what they report
//!  children     the processes
//!  process      one part: carries out the commands of the coordinator
//!  trainer      one part in one mode: the executor, the variables
//!  samples      what is fed and tested
//!  messages     what coordinator and parts say to each other: a line of JSON each
//! ```

mod arguments;
mod children;
mod coordinator;
mod messages;
mod outcome;
mod process;
pub(crate) mod samples;
pub(crate) mod trainer;

pub(crate) use arguments::{Common, GraphArguments, Named, Sync};
pub(crate) use coordinator::{Plan, run};
pub(crate) use outcome::{figure, text};
pub(crate) use process::serve;
