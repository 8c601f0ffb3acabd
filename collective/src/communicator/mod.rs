//! The communicator: a group of ranks, and its operations.
//!
//! ```text
//!   Communicator ── all_reduce(x) ──▶ Operation ── await, wait() or start() ──▶ engine
//!        │                                                                     ▲
//!        └─ a progress thread, which sleeps while a caller polls or nothing is under way
//! ```

mod arrays;
mod operation;
mod plans;
mod shared;

use std::sync::Arc;
use std::time::Duration;

use self::operation::Lengths;
use self::shared::{EngineKind, SharedState};
use crate::engine::{Call, Engine, Kind, Request};
use crate::error::{CollectiveError, CollectiveErrorKind, OperationStep, argument, setting};
use crate::group::{Group, Launch, Settings};
use crate::link::remote::{LinkSettings, RemoteLinks};
use crate::memory::{Buffer, MemoryPool};
use crate::plan::{Algorithm, Collective, Hosts, PlanTable, part};
use crate::reduce::{Kernel, Number, Reduction};
use tonic_rdma::Config;

pub use self::arrays::{Array, Arrays, Verb};
pub use self::operation::{Failed, Operand, Operation, Owned};
pub use self::plans::PlanChoice;

/// A group of ranks that carry out operations together.
///
/// All ranks start the same operations in the same order. Clones are the same group; the drop of the last one
/// ends it.
///
/// ```
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tonic_rdma_collective::{Communicator, Launch, Reduction};
///
/// // Each process makes its own; `from_env()` takes the launch from mpirun, torchrun or Slurm.
/// let communicator = Communicator::connect(Launch::new(0, 1, "127.0.0.1:0")).await?;
/// let mut gradients = communicator.allocate::<f32>(1000)?;
/// gradients.fill(1.0);
/// let gradients = communicator.all_reduce(gradients, Reduction::Mean).await?;
/// assert_eq!(gradients[999], 1.0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Communicator {
    shared: Arc<SharedState>,
    settings: CommunicatorBuilder,
    _stop: Arc<StopOnDrop>,
}

/// Ends the work of a group when the last clone of the communicator is dropped.
#[derive(Debug)]
struct StopOnDrop(Arc<SharedState>);

/// What a communicator has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Operations started.
    pub operations: u64,
    /// Operations of few elements that ended within one call.
    pub short: u64,
    /// Messages sent.
    pub messages: u64,
    /// Bytes that went with messages.
    pub inline_bytes: u64,
    /// Bytes that other ranks were asked to read.
    pub referenced_bytes: u64,
    /// Bytes that this rank read.
    pub read_bytes: u64,
    /// Bytes that this rank received, with messages or read.
    pub received_bytes: u64,
    /// Bytes that this rank sent to ranks of other hosts, with messages or for them to read.
    pub across_bytes: u64,
    /// Bytes of elements that this rank copied: none for buffers, each byte about once for slices and
    /// owned memory. Elements that travel with messages are not in this count.
    pub copied_bytes: u64,
}

impl Communicator {
    /// Meets the other ranks of `launch`, with the default settings. [`builder`](Self::builder) has others.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), tonic_rdma_collective::CollectiveError> {
    /// use tonic_rdma_collective::{Communicator, Launch};
    ///
    /// let communicator = Communicator::connect(Launch::new(0, 1, "127.0.0.1:0")).await?;
    /// assert_eq!((communicator.rank(), communicator.size()), (0, 1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`CommunicatorBuilder::connect`].
    pub async fn connect(launch: Launch) -> Result<Self, CollectiveError> {
        Self::builder().launch(launch).connect().await
    }

    /// Returns a builder with the default settings.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tonic_rdma_collective::{Communicator, Launch};
    ///
    /// let builder = Communicator::builder()
    ///     .launch(Launch::new(0, 4, "10.0.0.1:29000"))
    ///     .deadline(Duration::from_secs(5));
    /// ```
    pub fn builder() -> CommunicatorBuilder {
        CommunicatorBuilder::default()
    }

    /// Makes a communicator of a group that has just met.
    async fn first(group: Group, settings: CommunicatorBuilder) -> Result<Self, CollectiveError> {
        let choice = settings.plans.clone().unwrap_or_default();
        let pool = MemoryPool::new(&group.session.device, MemoryPool::KEPT);
        let communicator = Self::over(group, pool, settings).await?;
        if communicator.size() > 1 {
            communicator.shared.engine(EngineKind::Group).number_set_up();
            plans::agree(&communicator, &choice).await?;
            let mut engine = communicator.shared.engine(EngineKind::Group);
            engine.restart_numbers();
            engine.links.restart_counters();
        }
        Ok(communicator)
    }

    async fn over(
        group: Group,
        pool: MemoryPool,
        settings: CommunicatorBuilder,
    ) -> Result<Self, CollectiveError> {
        let (rank, size) = (group.rank(), group.size());
        let hosts: Hosts = group.hosts().into_iter().collect();
        let ranks_by_host: Vec<usize> = hosts.members(size).iter().map(Vec::len).collect();
        let channels: Vec<_> = (0..size).map(|peer| group.channel(peer).cloned()).collect();
        let links = LinkSettings {
            names: format!("{}/links", group.region_names()),
            limit: group.bootstrap_timeout(),
            hosts: hosts.clone(),
            ..LinkSettings::default()
        };
        let pairs = LinkSettings { names: format!("{}/pairs", links.names), ..links.clone() };
        let (generation, memory) = (group.generation(), pool.clone());
        // The links go on using the runtime on which they were opened, so it is not the caller's.
        let opened = group.run(async move {
            tokio::try_join!(
                RemoteLinks::open(channels.clone(), rank, &memory, generation, &links),
                RemoteLinks::open(channels, rank, &memory, generation, &pairs),
            )
        });
        let (first, second) = opened.await?;
        let engines = [first, second].map(|links| {
            let pool = pool.clone();
            let mut engine = Engine::new(rank, size, links, Box::new(move |bytes| pool.take(bytes)));
            engine.asks = true;
            engine.hosts = hosts.clone();
            engine
        });
        let plans = settings.plans.clone().unwrap_or_default().table(&ranks_by_host);
        let shared = SharedState::new(group, pool, plans, settings.limit, engines)?;
        let stop = Arc::new(StopOnDrop(Arc::clone(&shared)));
        Ok(Self { shared, settings, _stop: stop })
    }

    /// Returns the number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.shared.group.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.shared.group.size()
    }

    /// Returns the plans of the operations: the algorithm for each length, and the reason. They are equal on
    /// all ranks.
    ///
    /// ```
    /// # #[tokio::main(flavor = "multi_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma_collective::{Communicator, Launch, PlanChoice};
    ///
    /// let launch = Launch::new(0, 1, "127.0.0.1:0");
    /// let communicator = Communicator::connect(launch).await?;
    /// println!("{}", communicator.plans());
    /// // Later runs with this choice use the same algorithms, also with other versions of this library, and so get the same bits.
    /// let same = PlanChoice::Pinned(communicator.plans().pinned().parse()?);
    /// # let _ = same;
    /// # Ok(())
    /// # }
    /// ```
    pub fn plans(&self) -> &PlanTable {
        &self.shared.plans
    }

    /// Returns the part of a reduce-scatter or all-gather of `elements` elements that belongs to `rank`.
    pub fn part(&self, elements: usize, rank: usize) -> std::ops::Range<usize> {
        part(elements, self.size(), rank)
    }

    /// Returns registered memory of `length` elements, all zero.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let communicator = Communicator::connect(Launch::new(0, 1, "127.0.0.1:0")).await?;
    /// let mut buffer = communicator.allocate::<f64>(3)?;
    /// buffer.copy_from_slice(&[1.0, 2.0, 3.0]); // it is a &mut [f64]
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// There is no memory, or its pinned part has reached `RDMA_PINNED_LIMIT`.
    pub fn allocate<T: Number>(&self, length: usize) -> Result<Buffer<T>, CollectiveError> {
        Buffer::zeroed(&self.shared.pool, length)
    }

    /// Returns what this communicator has done since it was made. What the ranks did to agree on their plans
    /// is not in it.
    pub fn statistics(&self) -> Statistics {
        let mut sum = Statistics::default();
        for kind in EngineKind::ALL {
            let engine = self.shared.engine(kind);
            let (own, links) = (engine.statistics, engine.links.counters());
            sum.operations += own.operations;
            sum.short += own.short;
            sum.copied_bytes += own.copied;
            sum.messages += links.sent;
            sum.inline_bytes += links.inline_bytes;
            sum.referenced_bytes += links.referenced_bytes;
            sum.read_bytes += links.read_bytes;
            sum.received_bytes += links.received_bytes;
            sum.across_bytes += links.across_bytes;
        }
        sum
    }

    /// Reduces the elements of all ranks, index by index. All ranks get the result.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// # let address = &*format!("127.0.0.1:{port}");
    /// # let rank = async |rank| {
    /// # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
    /// let mut gradients = communicator.allocate::<f32>(1000)?;
    /// gradients.fill(0.5);
    /// let gradients = communicator.all_reduce(gradients, Reduction::Mean).await?; // in place, without a copy
    /// let sums = communicator.allocate(1000)?;
    /// let (gradients, sums) = communicator.all_reduce((gradients, sums), Reduction::Sum).await?; // out of place
    /// let mut loss = [0.25];
    /// communicator.all_reduce(&mut loss[..], Reduction::Max).await?; // any slice
    /// assert_eq!((gradients[0], sums[0], loss), (0.5, 0.5 * communicator.size() as f32, [0.25]));
    /// # communicator.barrier().await?;
    /// # Ok::<_, CollectiveError>(())
    /// # };
    /// # tokio::try_join!(rank(0), rank(1))?;
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn all_reduce<X: Operand>(&self, operand: X, reduction: Reduction) -> Operation<X> {
        let lengths = operand.lengths();
        let shape = Shape::whole(Collective::AllReduce, lengths);
        self.operation(operand, Shape { reduction: Some(reduction), ..shape })
    }

    /// Reduces the elements of all ranks, index by index. Each rank gets its own [`part`](Self::part) of the
    /// result: in place where the part lies in the whole, and otherwise in an output that has the length of
    /// the part.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// # let address = &*format!("127.0.0.1:{port}");
    /// # let rank = async |rank| {
    /// # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
    /// let mut elements = communicator.allocate::<u32>(5)?;
    /// elements.fill(1);
    /// let part = communicator.part(5, communicator.rank());
    /// let elements = communicator.reduce_scatter(elements, Reduction::Sum).await?;
    /// assert!(elements[part].iter().all(|sum| *sum == 2)); // the other elements may be anything
    /// # communicator.barrier().await?;
    /// # Ok::<_, CollectiveError>(())
    /// # };
    /// # tokio::try_join!(rank(0), rank(1))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_scatter<X: Operand>(&self, operand: X, reduction: Reduction) -> Operation<X> {
        let lengths = operand.lengths();
        let elements = lengths.input.unwrap_or(lengths.out);
        let part = self.part(elements, self.rank());
        let fits = lengths.input.is_none() || lengths.out == part.len();
        let out = if lengths.input.is_some() { (part.start, part.end) } else { (0, elements) };
        let (collective, reduction) = (Collective::ReduceScatter, Some(reduction));
        self.operation(operand, Shape { collective, reduction, elements, input: (0, elements), out, fits })
    }

    /// Gathers the parts of all ranks; all ranks get the whole. In place, the [`part`](Self::part) of a rank
    /// lies where it lies in the whole; otherwise the input is the part.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// # let address = &*format!("127.0.0.1:{port}");
    /// # let rank = async |rank| {
    /// # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
    /// let mut own = communicator.allocate::<u64>(1)?;
    /// own[0] = communicator.rank() as u64;
    /// let all = communicator.allocate(communicator.size())?;
    /// let (_, all) = communicator.all_gather((own, all)).await?;
    /// assert_eq!(all[..], [0, 1]);
    /// # communicator.barrier().await?;
    /// # Ok::<_, CollectiveError>(())
    /// # };
    /// # tokio::try_join!(rank(0), rank(1))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_gather<X: Operand>(&self, operand: X) -> Operation<X> {
        let shape = self.shape_of_all_gather(operand.lengths());
        self.operation(operand, shape)
    }

    /// Gathers by this algorithm, in messages of at most this length in bytes.
    fn all_gather_by<X: Operand>(&self, plan: (Algorithm, usize), operand: X) -> Operation<X> {
        let shape = self.shape_of_all_gather(operand.lengths());
        self.operation_by(plan, operand, shape)
    }

    fn shape_of_all_gather(&self, lengths: Lengths) -> Shape {
        let part = self.part(lengths.out, self.rank());
        let fits = lengths.input.is_none_or(|input| input == part.len());
        Shape { input: (part.start, part.end), fits, ..Shape::whole(Collective::AllGather, lengths) }
    }

    /// Gives all ranks the elements of rank `root`.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// # let address = &*format!("127.0.0.1:{port}");
    /// # let rank = async |rank| {
    /// # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
    /// let mut weights = communicator.allocate::<f32>(1000)?;
    /// if communicator.rank() == 0 {
    ///     weights.fill(0.5);
    /// }
    /// let weights = communicator.broadcast(weights, 0).await?;
    /// assert_eq!(weights[999], 0.5);
    /// # communicator.barrier().await?;
    /// # Ok::<_, CollectiveError>(())
    /// # };
    /// # tokio::try_join!(rank(0), rank(1))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast<X: Operand>(&self, operand: X, root: usize) -> Operation<X> {
        let shape = Shape::whole(Collective::Broadcast { root }, operand.lengths());
        self.operation(operand, shape)
    }

    /// Waits until all ranks have come to this call.
    pub fn barrier(&self) -> Operation<()> {
        self.operation((), Shape::whole(Collective::Barrier, Lengths { input: None, out: 0 }))
    }

    /// Sends elements to rank `to`, which calls [`recv`](Self::recv) with as many. Of a pair, the first is
    /// sent; a shared slice, `&[T]`, can be sent too. Messages from one rank to another arrive in order;
    /// their order against other operations is free.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// # let address = &*format!("127.0.0.1:{port}");
    /// # let rank = async |rank| {
    /// # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
    /// let mut word = communicator.allocate::<u32>(1)?;
    /// if communicator.rank() == 0 {
    ///     word[0] = 7;
    ///     communicator.send(1, word).await?;
    /// } else {
    ///     assert_eq!(communicator.recv(0, word).await?[0], 7);
    /// }
    /// # communicator.barrier().await?;
    /// # Ok::<_, CollectiveError>(())
    /// # };
    /// # tokio::try_join!(rank(0), rank(1))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn send<X: Operand>(&self, to: usize, operand: X) -> Operation<X> {
        self.point_to_point(Kind::Send { to }, operand)
    }

    /// Receives the next elements of rank `from`, which calls [`send`](Self::send) with as many. Of a pair,
    /// the second receives.
    pub fn recv<X: Operand>(&self, from: usize, operand: X) -> Operation<X> {
        self.point_to_point(Kind::Receive { from }, operand)
    }

    fn point_to_point<X: Operand>(&self, kind: Kind, operand: X) -> Operation<X> {
        let lengths = operand.lengths();
        // What is sent may come without an output.
        let only_sent = matches!(kind, Kind::Send { .. }) && lengths.out == 0;
        let wrong = !only_sent && lengths.input.is_some_and(|input| input != lengths.out);
        let elements = if only_sent { lengths.input.unwrap_or(0) } else { lengths.out };
        let call = Call {
            kind,
            dtype: operand.dtype(),
            reduction: None,
            algorithm: Algorithm::OneShot,
            elements,
            chunk: usize::MAX,
        };
        let input = lengths.input.map(|input| (0, input));
        let request = Request { call, input, out: (0, lengths.out), limit: self.shared.limit };
        Operation::new(&self.shared, EngineKind::PointToPoint, request, operand)
            .refused(wrong.then(|| unfit(&call, lengths)))
    }

    #[inline]
    fn operation<X: Operand>(&self, operand: X, shape: Shape) -> Operation<X> {
        let bytes = shape.elements.saturating_mul(operand.dtype().size().unwrap_or(1));
        let plan = self.shared.plans.choose_for(shape.collective, self.size(), bytes);
        self.operation_by(plan, operand, shape)
    }

    #[inline]
    fn operation_by<X: Operand>(
        &self,
        (algorithm, chunk): (Algorithm, usize),
        operand: X,
        shape: Shape,
    ) -> Operation<X> {
        let dtype = operand.dtype();
        let call = Call {
            kind: Kind::Group(shape.collective),
            dtype,
            reduction: shape.reduction,
            algorithm,
            elements: shape.elements,
            chunk: (chunk / dtype.size().unwrap_or(1)).max(1),
        };
        let input = operand.lengths().input.map(|_| shape.input);
        let request = Request { call, input, out: shape.out, limit: self.shared.limit };
        let error = if !shape.fits {
            Some(unfit(&call, operand.lengths()))
        } else if call.reduction == Some(Reduction::Mean) {
            Kernel::of(call.dtype, Reduction::Mean).err()
        } else {
            None
        };
        Operation::new(&self.shared, EngineKind::Group, request, operand).refused(error)
    }

    /// Makes a group of the ranks that are left after a failure. All of them call this. Their ranks are new,
    /// in the old order. Buffers of this group may be used in the new one.
    ///
    /// It has the plans of a fresh group with as many ranks on as many hosts and the same [`PlanChoice`], and so
    /// gets the same bits.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// # let address = &*format!("127.0.0.1:{port}");
    /// # let rank = async |rank| {
    /// # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
    /// # communicator.barrier().await?;
    /// # if rank == 0 {
    /// #     return Ok(());
    /// # }
    /// // Rank 0 of 2 has ended.
    /// let words = communicator.allocate::<u32>(1)?;
    /// assert!(communicator.all_reduce(words, Reduction::Sum).await.is_err());
    /// let communicator = communicator.shrink().await?;
    /// assert_eq!((communicator.rank(), communicator.size()), (0, 1));
    /// # communicator.barrier().await?;
    /// # Ok::<_, CollectiveError>(())
    /// # };
    /// # tokio::try_join!(rank(0), rank(1))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Excluded`](CollectiveErrorKind::Excluded): the others go on without this rank.
    /// - [`Setup`](CollectiveErrorKind::Setup): there was no agreement in time.
    pub async fn shrink(&self) -> Result<Self, CollectiveError> {
        let group = &self.shared.group;
        let reason = group.failure().reason().cloned();
        let reason = reason
            .unwrap_or_else(|| CollectiveError::new(CollectiveErrorKind::Revoked, None, "the group shrinks"));
        self.shared.revoke(&reason);
        // The group of the survivors has the same pool, so that buffers of this group go on being used
        // without a copy.
        let (group, pool) = (group.survivors().await?, self.shared.pool.clone());
        Self::over(group, pool, self.settings.clone()).await
    }
}

/// Calls `watch` before each step of each operation of the group, before a step that must wait also more than
/// once. For tests that end a rank at a certain step.
///
/// ```
/// # use tonic_rdma_collective::{Communicator, unstable};
/// # fn example(communicator: &Communicator) {
/// unstable::watch_steps(communicator, |at| println!("{at}")); // at step 0 of 3 of operation 17
/// # }
/// ```
pub fn watch_steps(communicator: &Communicator, watch: impl FnMut(OperationStep) + Send + 'static) {
    communicator.shared.engine(EngineKind::Group).watch = Some(Box::new(watch));
}

/// What an operation of the group does with its operand.
struct Shape {
    collective: Collective,
    reduction: Option<Reduction>,
    /// The number of elements of the whole.
    elements: usize,
    /// Where the elements that this rank gives lie in the whole: start and end. It counts only for operands
    /// with an input.
    input: (usize, usize),
    /// The same for the elements that this rank gets.
    out: (usize, usize),
    /// Whether the lengths of the operand fit.
    fits: bool,
}

impl Shape {
    /// Returns the shape of an operation in which each rank gives and gets the whole, without a reduction.
    fn whole(collective: Collective, lengths: Lengths) -> Self {
        let (elements, window) = (lengths.out, (0, lengths.out));
        let fits = lengths.input.is_none_or(|input| input == lengths.out);
        Self { collective, reduction: None, elements, input: window, out: window, fits }
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        // So that the progress thread drops what it shares with the handles.
        self.0.notify_thread();
    }
}

fn unfit(call: &Call, lengths: Lengths) -> CollectiveError {
    let Lengths { input, out } = lengths;
    let lengths = match input {
        Some(input) => format!("an input of {input} and an output of {out} elements do not fit"),
        None => format!("memory of {out} elements does not fit"),
    };
    argument(format!("{call}: {lengths}"))
}

/// Settings of a communicator.
#[derive(Clone)]
pub struct CommunicatorBuilder {
    launch: Option<Launch>,
    settings: Settings,
    limit: Duration,
    /// `None` if the program sets none.
    plans: Option<PlanChoice>,
}

impl Default for CommunicatorBuilder {
    fn default() -> Self {
        Self { launch: None, settings: Settings::default(), limit: Duration::from_secs(30), plans: None }
    }
}

impl CommunicatorBuilder {
    /// Takes rank, number of ranks and address from the environment that torchrun, Open MPI's mpirun or Slurm
    /// has set.
    ///
    /// # Errors
    /// See [`Launch::from_env`].
    pub fn from_env(self) -> Result<Self, CollectiveError> {
        Ok(self.launch(Launch::from_env()?))
    }

    /// Sets rank, number of ranks and address.
    pub fn launch(mut self, launch: Launch) -> Self {
        self.launch = Some(launch);
        self
    }

    /// Sets how long an operation may take. The default is 30 seconds.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets how the group chooses the plans of all operations. All ranks set the same. The default is that of
    /// the variable `RDMA_COLLECTIVE_PLANS`, or [`PlanChoice::Default`] without it.
    ///
    /// ```
    /// use tonic_rdma_collective::{Algorithm, Communicator, PlanChoice};
    ///
    /// let rings = PlanChoice::Fixed { algorithm: Algorithm::Ring, chunk_bytes: 64 << 10 };
    /// let builder = Communicator::builder().plans(rings);
    /// ```
    pub fn plans(mut self, plans: PlanChoice) -> Self {
        self.plans = Some(plans);
        self
    }

    /// Sets how connections are made, and which RDMA device they use. The default is what the `RDMA_*`
    /// variables say ([`Config::from_env`]).
    pub fn config(mut self, config: Config) -> Self {
        self.settings.config = Some(config);
        self
    }

    /// Sets how long the ranks wait for one another at the start, and how long two of them may take to make a
    /// link. The default is one minute.
    pub fn bootstrap_timeout(mut self, limit: Duration) -> Self {
        self.settings.bootstrap_timeout = limit;
        self
    }

    /// Sets how long a rank may take to answer a question of another, after a deadline or a loss. A machine
    /// on which the ranks' threads wait long for a core needs more than the default of 100 ms.
    pub fn answer_timeout(mut self, limit: Duration) -> Self {
        self.settings.answer_timeout = limit;
        self
    }

    /// Sets the TLS of calls to other ranks.
    #[cfg(feature = "_tls-any")]
    pub fn client_tls(mut self, tls: tonic::transport::ClientTlsConfig) -> Self {
        self.settings.client_tls = Some(tls);
        self
    }

    /// Sets the TLS of this rank's server.
    #[cfg(feature = "_tls-any")]
    pub fn server_tls(mut self, tls: tonic::transport::ServerTlsConfig) -> Self {
        self.settings.server_tls = Some(tls);
        self
    }

    /// Meets the other ranks, and makes sure that all have the same plans of operations.
    ///
    /// # Errors
    /// - There is no launch, the ranks do not meet in time, or there is no RDMA to a rank.
    /// - The variable `RDMA_COLLECTIVE_PLANS` has a value that can't be read, or the ranks have different
    ///   [`PlanChoice`]s.
    /// - A rank is lost, or does not answer. The error names the rank.
    pub async fn connect(mut self) -> Result<Communicator, CollectiveError> {
        if self.plans.is_none() {
            self.plans = Some(PlanChoice::from_env()?);
        }
        let Some(launch) = self.launch.clone() else {
            return Err(setting("neither rank nor address are set; call from_env, or launch"));
        };
        let launch = launch.with_host_from(|name| std::env::var_os(name))?;
        let group = Group::join(launch, self.settings.clone()).await?;
        Communicator::first(group, self).await
    }
}

impl std::fmt::Debug for CommunicatorBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommunicatorBuilder")
            .field("launch", &self.launch)
            .field("limit", &self.limit)
            .field("plans", &self.plans)
            .finish_non_exhaustive()
    }
}
