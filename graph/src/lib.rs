//! Data-flow graphs that are split over processes, and whose tensors cross by RDMA.
//!
//! The runtime of a graph knows, before the first step, which tensors cross from process to process, and the
//! shapes of most of them (Xue et al., *Fast Distributed Deep Learning over RDMA*, EuroSys 2019; § in these
//! pages means a section of that paper). This crate is that runtime. An existing engine computes the nodes:
//! `tract-onnx` for ONNX models, and any framework whose values implement [`Value`](dataflow::Value).
//!
//! ```text
//!  session    the processes of a split graph: they find one another, distribute addresses (§3.4), and run
//!  transfer   senders and receivers of crossing tensors: gRPC calls, static slots, dynamic slots (§3.2, §3.3)
//!  explain    what becomes of each crossing tensor, as text and as JSON
//!  schedule   an executor of ready nodes; a receive that has not arrived goes to the tail of the queue (§4)
//!  onnx       ONNX models by tract: nodes, facts, kernels
//!  sites      which allocation of which node makes each crossing tensor (§3.4)
//!  partition  which node belongs to which part: balanced, or as the user says
//!  placement  crossing tensors, each static or dynamic (§3.4)
//!  dataflow   nodes, edges, shapes; what a kernel and a value are
//! ```
#![forbid(unsafe_code)]

pub mod dataflow;
mod error;
pub mod explain;
pub mod onnx;
mod partition;
pub mod placement;
pub mod schedule;
pub mod session;
pub mod sites;
pub mod transfer;

pub use error::{GraphError, GraphErrorKind};
