//! "Collectives": two ranks, which a launcher would start as processes.

use std::cell::RefCell;
use std::net::TcpListener;
use std::time::Duration;

use tonic_rdma_collective::{CollectiveError, CommunicatorBuilder, Fusion, Launch, Reduction};

use super::running::{self, Outcome, ROUNDS, default_runtime};

/// The number of ranks.
const RANKS: usize = 2;

thread_local! {
    /// What the launcher of the rank on this thread says. All threads of a process share its environment, so it can't be there.
    static LAUNCH: RefCell<Option<Launch>> = const { RefCell::new(None) };
}

/// Stands in for `tonic_rdma_collective::Communicator`, whose builder reads the environment.
struct Communicator;

/// Stands in for `tonic_rdma_collective::CommunicatorBuilder`.
struct Builder;

impl Communicator {
    fn builder() -> Builder {
        Builder
    }
}

impl Builder {
    #[allow(clippy::wrong_self_convention, reason = "the library's method has this name")]
    fn from_env(self) -> Result<CommunicatorBuilder, CollectiveError> {
        let launch = LAUNCH.with_borrow(|launch| launch.clone().unwrap());
        Ok(tonic_rdma_collective::Communicator::builder().launch(launch))
    }
}

#[test]
fn reads_as_in_readme() {
    on_each_rank(|_| in_readme());
}

#[test]
fn reduces_as_in_the_book() {
    on_each_rank(|rank| async move { Ok(in_the_book(rank).await?) });
}

#[test]
fn starts_operations_as_in_the_book() {
    on_each_rank(|_| under_way());
}

#[test]
fn fuses_as_in_the_book() {
    on_each_rank(|_| fused());
}

#[test]
fn goes_on_as_in_the_book() {
    on_each_rank(without_a_rank);
}

/// Runs `program` as each rank, on a thread with a runtime of its own.
fn on_each_rank<F>(program: impl Fn(usize) -> F + Copy + Send + 'static)
where
    F: Future<Output = Outcome> + 'static,
{
    // The port is free now; no other test of this process listens at the same time.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    running::run(default_runtime(), async move {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let address = address.clone();
                tokio::task::spawn_blocking(move || {
                    LAUNCH.set(Some(Launch::new(rank, RANKS, address)));
                    default_runtime().block_on(program(rank))
                })
            })
            .collect();
        for rank in ranks {
            rank.await??;
        }
        Ok(())
    });
}

#[rustfmt::skip]
async fn in_readme() -> Outcome {
    let communicator = Communicator::builder().from_env()?.connect().await?;      // in each of N processes
    let mut gradients = communicator.allocate::<f32>(1_000_000)?;                 // fill it: &mut [f32]
    for round in 0..ROUNDS / 10 {
        gradients.fill(round as f32 + communicator.rank() as f32);
        let reduced = {
    let gradients = communicator.all_reduce(gradients, Reduction::Mean).await?;   // in place, without a copy
            gradients
        };
        assert!(reduced.iter().all(|mean| *mean == round as f32 + 0.5), "round {round}");
        gradients = reduced;
    }
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the book prints it")]
#[rustfmt::skip]
async fn in_the_book(rank: usize) -> Result<(), CollectiveError> {
    let communicator = Communicator::builder().from_env()?.connect().await?;      // mpirun, torchrun or srun set rank and size
    println!("rank {} of {}\n{}", communicator.rank(), communicator.size(), communicator.plans());
    assert_eq!((communicator.rank(), communicator.size()), (rank, RANKS));

    let mut gradients = communicator.allocate::<f32>(1_000_000)?;                 // fill it: &mut [f32]
    gradients.fill(rank as f32);
    let gradients = communicator.all_reduce(gradients, Reduction::Mean).await?;   // in place, no copy, equal bits on all ranks
    assert!(gradients.iter().all(|mean| *mean == 0.5));

    for _ in 0..ROUNDS {
        let mut loss = [0.25];
        communicator.all_reduce(&mut loss[..], Reduction::Max).wait()?;               // any slice; polls on this thread
        assert_eq!(loss, [0.25]);
    }
    Ok(())
}

#[rustfmt::skip]
async fn under_way() -> Outcome {
    let communicator = Communicator::builder().from_env()?.connect().await?;
    let mut one = communicator.allocate::<i64>(3)?;
    let mut two = communicator.allocate::<i64>(100_000)?;
    for round in 0..ROUNDS as i64 / 10 {
        one.fill(round);
        two.fill(1);
        let (first, second) = (one, two);
        let ended = {
    let first = communicator.all_reduce(first, Reduction::Sum).start();           // under way
    let second = communicator.all_reduce(second, Reduction::Sum).deadline(Duration::from_secs(5)).start();
    // compute something else, then await in any order
    let second = second.await?;
    let first = first.await?;
            (first, second)
        };
        (one, two) = ended;
        assert!(one.iter().all(|sum| *sum == 2 * round) && two.iter().all(|sum| *sum == 2));
    }
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the book prints it")]
#[rustfmt::skip]
async fn fused() -> Outcome {
    let communicator = Communicator::builder().from_env()?.connect().await?;
    let (gradient_of_layer_2, length_of_layer_1) = ([0.5; 10], 1000);
    let mut fusion = Fusion::<f32>::builder(&communicator).build()?;
    for _ in 0..ROUNDS / 10 {
        let mut step = fusion.step()?;
        step.put("layer2", &gradient_of_layer_2)?;                                    // copied into its bucket
        let mut layer1 = step.slot("layer1", length_of_layer_1)?;                     // fill it: computed in its bucket
        layer1.fill(0.25);
        layer1.ready()?;
        let means = step.finish().await?;                                             // waits for what is still under way
        println!("{:?} {}", means.get("layer1"), means.overlap());
        assert_eq!(means.get("layer1"), Some(&[0.25; 1000][..]));
        assert_eq!(means.get("layer2"), Some(&[0.5; 10][..]));
    }
    Ok(())
}

#[allow(clippy::print_stderr, reason = "the book prints it")]
#[allow(unused_mut, reason = "the book does not show all")]
#[rustfmt::skip]
async fn without_a_rank(rank: usize) -> Outcome {
    let mut communicator = Communicator::builder().from_env()?.connect().await?;
    communicator.barrier().await?;
    if rank == 1 {
        return Ok(());
    }
    let gradients = communicator.allocate::<f32>(1000)?;
    let result = communicator.all_reduce(gradients, Reduction::Sum).await;
    if let Err(failed) = result {
        eprintln!("{failed}");                           // rank 1 is lost, noticed at step 0 of 2 of operation 17: …
        let (error, gradients) = failed.into_parts();    // the elements come back, with any content
        communicator = communicator.shrink().await?;     // all survivors call this
        assert_eq!(error.lost_rank(), Some(1), "{error}");
        assert!(gradients.is_some());
    }
    assert_eq!(communicator.size(), 1);
    Ok(())
}
