//! Which algorithm an operation takes, and how the ranks make sure that they agree on it.

use std::fmt;
use std::str::FromStr;

use super::Communicator;
use crate::error::{CollectiveError, setting};
use crate::plan::{Algorithm, PlanTable};

/// The variable that sets the plans of communicators for which the program sets none.
const VARIABLE: &str = "RDMA_COLLECTIVE_PLANS";
/// The largest length of a choice in a message, in bytes. Of a longer text, the end is not compared.
const CHOICE: usize = 4 << 10;

/// How a group chooses the plans of its operations. All ranks set the same; otherwise
/// [`connect`](crate::CommunicatorBuilder::connect) fails, and the error names a rank that set something
/// else.
///
/// Results have the same bits on all ranks, and from run to run where the runs have the same plans, and the
/// same ranks on each host. `tonic-rdma-allreduce --tuner-check` shows how long each algorithm takes on a machine.
/// To set the plans by such a measurement:
///
/// ```
/// use tonic_rdma_collective::{Communicator, PlanChoice};
///
/// let text = "one-shot:..16KiB,halving-doubling:..1MiB,ring:..";
/// let builder = Communicator::builder().plans(PlanChoice::Pinned(text.parse()?));
/// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanChoice {
    /// [`PlanTable::for_hosts`]: by the number of bytes, and of the ranks on each host, alone.
    #[default]
    Default,
    /// One algorithm for all lengths, in messages of at most `chunk_bytes`.
    Fixed {
        /// The algorithm.
        algorithm: Algorithm,
        /// The largest length of a message in bytes.
        chunk_bytes: usize,
    },
    /// This table.
    Pinned(PlanTable),
}

impl FromStr for PlanChoice {
    type Err = CollectiveError;

    /// Parses `default`, or the text form of a [`PlanTable`].
    ///
    /// ```
    /// use tonic_rdma_collective::PlanChoice;
    ///
    /// assert_eq!("default".parse::<PlanChoice>()?, PlanChoice::Default);
    /// assert_eq!("ring/64KiB".parse::<PlanChoice>()?, PlanChoice::Pinned("ring/64KiB".parse()?));
    /// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    /// The text has another form. The error names the part at fault.
    fn from_str(text: &str) -> Result<Self, CollectiveError> {
        match text.trim() {
            "default" => Ok(Self::Default),
            text => Ok(Self::Pinned(text.parse()?)),
        }
    }
}

/// The text that [`FromStr`] parses.
impl fmt::Display for PlanChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Fixed { algorithm, chunk_bytes } => {
                f.write_str(&PlanTable::fixed(*algorithm, *chunk_bytes).pinned())
            }
            Self::Pinned(table) => f.write_str(&table.pinned()),
        }
    }
}

impl PlanChoice {
    /// Returns the choice of the environment; the default if it has none.
    ///
    /// # Errors
    /// The variable has another form.
    pub(super) fn from_env() -> Result<Self, CollectiveError> {
        let Some(value) = std::env::var_os("RDMA_COLLECTIVE_PLANS") else { return Ok(Self::default()) };
        let text = value.to_string_lossy();
        text.parse().map_err(|error| {
            setting(format!("{VARIABLE}={text:?}: takes default or a table of plans; {error}"))
        })
    }

    /// Returns the table of a group with this many ranks on each host.
    pub(super) fn table(&self, hosts: &[usize]) -> PlanTable {
        match self {
            Self::Default => PlanTable::for_hosts(hosts),
            Self::Fixed { algorithm, chunk_bytes } => PlanTable::fixed(*algorithm, (*chunk_bytes).max(1)),
            Self::Pinned(table) => table.clone(),
        }
    }
}

/// Returns the text that the ranks compare. That of the default has its table too, because another version
/// of this library may have another one.
fn compared(choice: &PlanChoice, table: &PlanTable) -> String {
    let table = table.pinned();
    if *choice == PlanChoice::Default { format!("default: {table}") } else { table }
}

/// Makes sure that all ranks have the same choice. A failure of this rank alone is reported to the others.
pub(super) async fn agree(communicator: &Communicator, choice: &PlanChoice) -> Result<(), CollectiveError> {
    let agreed = compare(communicator, choice).await;
    if let Err(error) = &agreed {
        communicator.shared.report_failure(error);
    }
    agreed
}

async fn compare(communicator: &Communicator, choice: &PlanChoice) -> Result<(), CollectiveError> {
    let (rank, own) = (communicator.rank(), compared(choice, communicator.plans()));
    // A buffer and not a slice, so that the progress thread carries the operation on: this may be a thread of
    // a runtime.
    let mut texts = communicator.allocate::<u8>(communicator.size() * CHOICE)?;
    let length = own.len().min(CHOICE);
    texts[rank * CHOICE..][..length].copy_from_slice(&own.as_bytes()[..length]);
    // The tables may differ, so this operation uses none of them.
    let texts = communicator.all_gather_by((Algorithm::OneShot, CHOICE), texts).await?;
    let (first, _) = texts.split_at(CHOICE);
    let other = texts.chunks_exact(CHOICE).position(|text| text != first);
    let Some(other) = other else { return Ok(()) };
    let text = |rank: usize| {
        let text = texts.chunks_exact(CHOICE).nth(rank).unwrap_or_default();
        String::from_utf8_lossy(text).trim_end_matches('\0').to_owned()
    };
    Err(setting(format!(
        "rank {other} has the plans {:?}, and rank 0 has {:?}; all ranks need the same: set them in the program or with {VARIABLE}",
        text(other),
        text(0),
    )))
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Barrier;
    use std::task::{Context, Waker};
    use std::time::Duration;

    use super::{CHOICE, PlanChoice, agree, compared};
    use crate::communicator::Communicator;
    use crate::communicator::shared::{EngineKind, Polling};
    use crate::error::argument;
    use crate::group::{Group, Launch, Settings};
    use crate::plan::Algorithm;

    /// Joins the group, without the agreement on the plans. Blocks this thread.
    fn join(rank: usize, ranks: usize, address: &str) -> (tokio::runtime::Runtime, Communicator) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let communicator = runtime.block_on(async {
            let group = Group::join(Launch::new(rank, ranks, address), Settings::default()).await?;
            let pool = crate::memory::MemoryPool::new(&group.session.device, crate::memory::MemoryPool::KEPT);
            Communicator::over(group, pool, Communicator::builder()).await
        });
        (runtime, communicator.unwrap())
    }

    #[test]
    fn a_rank_that_is_lost_before_it_has_sent_its_plans_is_named() {
        let address = support::free_address();
        let (address, all) = (&address, &Barrier::new(3));
        let rank = |rank: usize| {
            let (runtime, communicator) = join(rank, 3, address);
            if rank == 2 {
                drop(communicator);
                all.wait();
                return;
            }
            let error = runtime.block_on(agree(&communicator, &PlanChoice::Default)).unwrap_err();
            all.wait();
            assert!(error.to_string().contains("rank 2"), "rank {rank}: {error}");
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || rank(number))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }

    /// A rank of another version of this library may have another default.
    #[test]
    fn a_rank_that_does_not_say_its_default_table_is_named() {
        let address = support::free_address();
        let (address, all) = (&address, &Barrier::new(2));
        let rank = |rank: usize| {
            let (runtime, communicator) = join(rank, 2, address);
            if rank == 0 {
                let agreed = runtime.block_on(agree(&communicator, &PlanChoice::Default));
                all.wait();
                return agreed.unwrap_err().to_string();
            }
            let mut texts = vec![0_u8; 2 * CHOICE];
            texts[CHOICE..][..7].copy_from_slice(b"default");
            let gathered = communicator.all_gather_by((Algorithm::OneShot, CHOICE), &mut texts[..]).wait();
            all.wait();
            gathered.map(|_| String::new()).unwrap()
        };
        let [error, _] = std::thread::scope(|scope| {
            [0, 1].map(|number| scope.spawn(move || rank(number))).map(|rank| rank.join().unwrap())
        });
        assert!(
            error.contains(r#"rank 1 has the plans "default", and rank 0 has "default: one-shot"#),
            "{error}"
        );
    }

    #[test]
    fn a_late_rank_ends_its_set_up_after_a_rank_that_went_on_has_failed() {
        let address = support::free_address();
        let (address, all, done) = (&address, &Barrier::new(2), &Barrier::new(2));
        let rank = |rank: usize| {
            let (runtime, communicator) = join(rank, 2, address);
            communicator.shared.engine(EngineKind::Group).number_set_up();
            // Both ranks send their plans. Only rank 0 takes the answer before the group fails.
            if rank == 1 {
                let mut texts = vec![0_u8; 2 * CHOICE];
                let own = compared(&PlanChoice::Default, communicator.plans());
                texts[CHOICE..][..own.len()].copy_from_slice(own.as_bytes());
                let mut gathered = communicator.all_gather_by((Algorithm::OneShot, CHOICE), &mut texts[..]);
                let mut context = Context::from_waker(Waker::noop());
                assert!(Pin::new(&mut gathered).poll(&mut context).is_pending());
                let polling = Polling::new(&communicator.shared, EngineKind::Group);
                all.wait();
                let reason = runtime.block_on(communicator.shared.group.failure().wait());
                // This is what any thread does after a poll that finds nothing.
                communicator.shared.apply_failure(reason, None, false);
                // This thread polls but does not run for a while. The progress thread must not end the
                // operation meanwhile.
                std::thread::sleep(Duration::from_millis(300));
                let ended = gathered.wait().map(drop);
                drop(polling);
                done.wait();
                ended.unwrap();
                assert!(texts.starts_with(b"default"));
                return;
            }
            all.wait();
            let agreed = runtime.block_on(agree(&communicator, &PlanChoice::Default));
            communicator.shared.group.report(argument("a later call differs"));
            done.wait();
            agreed.unwrap();
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|number| scope.spawn(move || rank(number))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }
}
