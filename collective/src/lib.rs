//! Allreduce and its family over RDMA, for processes that speak gRPC.
//!
//! N processes, the *ranks*, each have an array of numbers, and all want the sum: that is an all-reduce, the
//! step of data-parallel training in which the ranks average their gradients. Elements move by RDMA, without
//! a call and without a copy. gRPC remains for control: the ranks meet, watch one another, and agree on the
//! survivors of a failure by gRPC calls.
//!
//! ```text
//!  Launch ── rank, number of ranks, address: from mpirun, torchrun or Slurm, or from code
//!     │ Communicator::builder().from_env()?.connect().await?
//!     ▼
//!  Communicator ── all_reduce(x, Sum) … ──▶ Operation ── .await, wait() or start() ──▶ x with the result
//!     │                                                                       └──────▶ Failed: the error, and x
//!     └─ shrink() ──▶ a communicator of the ranks that are left
//! ```
//!
//! # Install
//!
//! ```toml
//! [dependencies]
//! tonic-rdma-collective = { git = "https://github.com/tonic-rdma/tonic-rdma" }
//! tokio = { version = "1", features = ["macros", "rt-multi-thread"] }
//! ```
//!
//! The software device, which connects processes of one host, is always there. The [features](#features) add
//! network cards and TLS.
//!
//! # When to use it
//!
//! Use this crate if processes combine arrays again and again, and RDMA connects them: the software device
//! within a host, a network card between hosts. There is no fallback to TCP. All ranks run the same program,
//! step by step. If one process gives and others take, as with a parameter server, use the slots of
//! [tonic-rdma-tensor](tonic_rdma_tensor).
//!
//! # A whole example
//!
//! ```
//! use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
//!
//! async fn work(launch: Launch) -> Result<(), CollectiveError> {
//!     let communicator = Communicator::connect(launch).await?; // in use: Launch::from_env()?
//!
//!     let mut gradients = communicator.allocate::<f32>(100_000)?; // registered memory: a &mut [f32]
//!     gradients.fill(communicator.rank() as f32);
//!     let gradients = communicator.all_reduce(gradients, Reduction::Mean).await?; // in place, without a copy
//!     assert!(gradients.iter().all(|mean| *mean == 1.0)); // of 0, 1 and 2
//!
//!     let mut loss = [0.5]; // any other memory
//!     communicator.all_reduce(&mut loss[..], Reduction::Max).await?;
//!     communicator.barrier().await?; // so that no rank leaves before the others are done
//!     Ok(())
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), CollectiveError> {
//! # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
//! # let address = &*format!("127.0.0.1:{port}");
//! // Three ranks in one process, as in a test. In use, `mpirun -n 3 PROGRAM` starts a process for each.
//! let rank = |rank| work(Launch::new(rank, 3, address));
//! tokio::try_join!(rank(0), rank(1), rank(2))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Operations
//!
//! | operation | rank r gives | rank r gets |
//! |---|---|---|
//! | [`all_reduce`](Communicator::all_reduce) | all elements | the reduction of all ranks |
//! | [`reduce_scatter`](Communicator::reduce_scatter) | all elements | part r of the reduction |
//! | [`all_gather`](Communicator::all_gather) | part r | all parts |
//! | [`broadcast`](Communicator::broadcast) | all elements, at the root | the root's elements |
//! | [`barrier`](Communicator::barrier) | – | the return, when all ranks have come |
//! | [`send`](Communicator::send), [`recv`](Communicator::recv) | elements for one rank | elements of one rank |
//!
//! A [`Reduction`] is a sum, mean, minimum or maximum, over `f32`, `f64`, `f16`, `bf16` and integers
//! ([`Number`]). Any number of elements will do, and [`part`](Communicator::part) says which of them part r
//! has. Operands ([`Operand`]) are buffers, [`Owned`] memory and slices, in place or out of place.
//!
//! ```
//! # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
//! # #[tokio::main]
//! # async fn main() -> Result<(), CollectiveError> {
//! # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
//! # let address = &*format!("127.0.0.1:{port}");
//! # let rank = async |rank| {
//! # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
//! // Out of place: the first buffer stays as it is. Three elements of two ranks are parts of two and of one.
//! let mut input = communicator.allocate::<i32>(3)?;
//! input.copy_from_slice(&[1, 2, 3]);
//! let part = communicator.part(3, communicator.rank());
//! let output = communicator.allocate(part.len())?;
//! let (input, sums) = communicator.reduce_scatter((input, output), Reduction::Sum).await?;
//! assert_eq!((&input[..], &sums[..]), (&[1, 2, 3][..], &[2, 4, 6][part]));
//!
//! // In place: the part of a rank lies where it lies in the whole.
//! let mut whole = communicator.allocate::<i32>(3)?;
//! let part = communicator.part(3, communicator.rank());
//! whole[part].copy_from_slice(&sums);
//! assert_eq!(communicator.all_gather(whole).await?[..], [2, 4, 6]);
//!
//! // From one rank to another.
//! let mut word = [communicator.rank() as u64];
//! match communicator.rank() {
//!     0 => communicator.send(1, &mut word[..]).await?,
//!     _ => communicator.recv(0, &mut word[..]).await?,
//! };
//! assert_eq!(word, [0]);
//! # communicator.barrier().await?;
//! # Ok::<_, CollectiveError>(())
//! # };
//! # tokio::try_join!(rank(0), rank(1))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Many at once
//!
//! An operation takes its place in the order when it starts: with [`start`](Operation::start), with
//! [`wait`](Operation::wait), or when its future is polled first. **All ranks must start the same operations
//! in the same order.** They may await them in any order.
//!
//! ```
//! # use std::time::Duration;
//! # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
//! # #[tokio::main]
//! # async fn main() -> Result<(), CollectiveError> {
//! # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
//! # let address = &*format!("127.0.0.1:{port}");
//! # let rank = async |rank| {
//! # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
//! # let (large, small) = (communicator.allocate::<f32>(1 << 20)?, communicator.allocate::<f32>(1)?);
//! let large = communicator.all_reduce(large, Reduction::Sum).start();
//! let small = communicator.all_reduce(small, Reduction::Sum).deadline(Duration::from_secs(5)).start();
//! // Both are under way, while this task computes something else.
//! let small = small.await?;
//! let large = large.await?;
//! # communicator.barrier().await?;
//! # Ok::<_, CollectiveError>(())
//! # };
//! # tokio::try_join!(rank(0), rank(1))?;
//! # Ok(())
//! # }
//! ```
//!
//! Operations on buffers and [`Owned`] memory go on without being awaited: a thread of the communicator
//! carries them on. Operations on slices go on only while they are awaited, so drive them to their end.
//! `.await` blocks no thread. [`wait`](Operation::wait) blocks its thread and polls; it has the lowest
//! latency, and is not for a thread of an async runtime.
//!
//! # Many small tensors
//!
//! [`Fusion`] puts small gradients into buckets, and reduces the first buckets while the caller computes the
//! others. It measures how much of the communication was hidden. Its page has an example.
//!
//! # Equal results
//!
//! Each element is reduced in one order, which depends on the plan alone. So results are equal to the bit: on
//! all ranks always, and from run to run under the same plan, whatever the timing. The plan says which
//! [`Algorithm`] an operation of a length uses; [`plans`](Communicator::plans) prints it, and [`PlanChoice`]
//! says how it is chosen and how it is pinned.
//!
//! # Failures
//!
//! An operation that fails returns [`Failed`]: the error, and the elements. A rank that is killed gives
//! [`RankLost`](CollectiveErrorKind::RankLost) on all others within milliseconds. A rank that is stopped
//! gives [`Deadline`](CollectiveErrorKind::Deadline), and a rank that calls something else gives
//! [`Mismatch`](CollectiveErrorKind::Mismatch). After the first error of an
//! operation that has started, all operations of the communicator fail. [`shrink`](Communicator::shrink)
//! gives the survivors a working group.
//!
//! ```
//! # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
//! # #[tokio::main]
//! # async fn main() -> Result<(), CollectiveError> {
//! # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
//! # let address = &*format!("127.0.0.1:{port}");
//! # let rank = async |rank| {
//! # let mut communicator = Communicator::connect(Launch::new(rank, 3, address)).await?;
//! # communicator.barrier().await?;
//! # if rank == 1 {
//! #     return Ok(());
//! # }
//! # let gradients = communicator.allocate::<f32>(1000)?;
//! // Rank 1 of 3 has ended.
//! if let Err(failed) = communicator.all_reduce(gradients, Reduction::Sum).await {
//!     let (error, gradients) = failed.into_parts();
//!     assert_eq!(error.lost_rank(), Some(1));
//!     communicator = communicator.shrink().await?; // all survivors call this
//!     assert_eq!(communicator.size(), 2);
//! }
//! # communicator.barrier().await?;
//! # Ok::<_, CollectiveError>(())
//! # };
//! # tokio::try_join!(rank(0), rank(1), rank(2))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Costs
//!
//! - On one host, processes of one user read one another's memory, and a message is some stores and loads.
//!   Elsewhere a message is an inline WRITE, and the elements of long ones are read by RDMA READ.
//! - Buffers are not copied. Of a slice or owned memory, the elements that other ranks read are copied to
//!   registered memory once.
//! - Ranks of several hosts add within each host first, except in the smallest operations. So each of H hosts
//!   sends 2(H−1)/H times the elements to the others, however many ranks it has.
//! - A communicator has a channel to each other rank, one thread that carries on operations, and one for
//!   gRPC. Both sleep while nothing is under way. Registered memory of dropped buffers is used again.
//! - A rank that waits spins for at most 100 µs, then yields its core, then naps for at most 1 ms. Where ranks
//!   outnumber cores it yields at once.
//!
//! # Limits
//!
//! - At most 4096 ranks. They compare the lengths of an operation up to 2^40 − 1 elements only. 64
//!   operations of the group move concurrently; 65 536 may be unfinished, and as many messages between two
//!   ranks.
//! - Groups are not split. Several communicators in one process work, each with an address of its own.
//! - Elements are not encrypted. Memory of [`allocate`](Communicator::allocate) counts against
//!   `RDMA_PINNED_LIMIT`.
//! - No memory of GPUs.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `ibverbs` | network cards: RoCE, InfiniBand and iWARP |
//! | `tls-ring`, `tls-aws-lc` | TLS for the calls by which ranks find one another: `CommunicatorBuilder::client_tls`, `server_tls` |
//!
//! The book's page on collectives has the settings, the launchers and the measurements.
#![forbid(unsafe_code)]

mod communicator;
pub(crate) mod engine;
mod error;
mod fusion;
pub(crate) mod group;
pub(crate) mod link;
mod memory;
pub(crate) mod plan;
mod reduce;

/// What the other packages of tonic-rdma need and applications do not. It changes only with a new minor
/// version (0.1 to 0.2), never with a patch, so `version = "0.1"` is enough.
pub mod unstable {
    pub use crate::communicator::{Array, Arrays, Verb, watch_steps};
    pub use crate::error::OperationStep;
    pub use crate::reduce::Kernel;
}

pub use crate::communicator::{
    Communicator, CommunicatorBuilder, Failed, Operand, Operation, Owned, PlanChoice, Statistics,
};
pub use crate::error::{CollectiveError, CollectiveErrorKind};
pub use crate::fusion::{Finish, Fusion, FusionBuilder, Means, Overlap, Slot, Step};
pub use crate::group::Launch;
pub use crate::memory::Buffer;
pub use crate::plan::{Algorithm, PlanRange, PlanTable};
pub use crate::reduce::{Number, Reduction};
