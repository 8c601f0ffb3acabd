//! Training through the graphs of `tonic-rdma-graph`: several processes run one graph, in one mode of transfer after the other.
//!
//! ```text
//!  command      what the command line asks for, and what comes out
//!  coordinator  starts the processes, tells them what to do, compares what they report
//!  process      one part: carries out the commands of the coordinator
//!  trainer      one part in one mode: the executor, the variables
//!  samples      what is fed and tested
//!  messages     what coordinator and parts say to each other: a line of JSON each
//! ```

mod messages;
pub(crate) mod samples;
pub(crate) mod trainer;
