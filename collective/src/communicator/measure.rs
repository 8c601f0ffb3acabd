//! How the ranks agree on their plans when they connect: they compare what they were told, and measure if that is to be measured.
//!
//! ```text
//!   rank 0                                    all other ranks
//!   the tuner's next trial ── broadcast ──▶   the same trial
//!   all-reduces, with the clock        …      all-reduces, with the clock
//!   the times of the slowest     ◀─ max ─▶    the times of the slowest
//!   no trial is left: a table ─ broadcast ─▶  the same table
//! ```
//!
//! Rank 0 decides.

use std::time::{Duration, Instant};

use super::Communicator;
use super::plans::PlanChoice;
use crate::error::CollectiveError;
use crate::lane::remote::LaneSettings;
use crate::memory::Buffer;
use crate::plan::Algorithm;
use crate::reduce::Reduction;
use crate::tuner::{PlanTable, Trial, Tuner};

/// The time that the measured operations take together, without the barriers before them.
const BUDGET: Duration = Duration::from_millis(400);
/// The trials end after this time also if they took longer than they should, because other work keeps the ranks from running.
const END: Duration = Duration::from_millis(1200);
/// How long the ranks sleep, and how often in a trial, if they outnumber the cores. Then the system puts them on cores anew: which ranks
/// share a core makes a difference of up to 30 %, and would otherwise stay as it is.
const NAP: Duration = Duration::from_micros(50);
const NAPS: u32 = 4;
/// The longest trial. The tuner judges longer operations by those that it measured.
const LARGEST: usize = 16 << 20;
/// The largest length of a choice in a message, in bytes. Of a longer text, the end is not compared.
const CHOICE: usize = 4 << 10;

/// Agrees with the other ranks on the plans, and sets them. Blocks this thread.
pub(super) fn agree(communicator: &Communicator, choice: &PlanChoice) -> Result<(), CollectiveError> {
    let agreed = try_agree(communicator, choice);
    if let Err(error) = &agreed {
        // The other ranks are told too if this one alone has failed.
        communicator.shared.tell(error);
    }
    agreed
}

fn try_agree(communicator: &Communicator, choice: &PlanChoice) -> Result<(), CollectiveError> {
    let ranks = communicator.size();
    if ranks > 1 {
        compare(communicator, choice)?;
    }
    let table = match choice.table(ranks) {
        Some(table) => table,
        None => measure(communicator)?,
    };
    communicator.shared.plans.set(table);
    Ok(())
}

/// Compares the choices of all ranks.
fn compare(communicator: &Communicator, choice: &PlanChoice) -> Result<(), CollectiveError> {
    let rank = communicator.rank();
    let own = choice.to_string();
    let mut texts = vec![0_u8; communicator.size() * CHOICE];
    let length = own.len().min(CHOICE);
    texts[rank * CHOICE..][..length].copy_from_slice(&own.as_bytes()[..length]);
    communicator.all_gather(&mut texts[..]).wait()?;
    let (first, _) = texts.split_at(CHOICE);
    let other = texts.chunks_exact(CHOICE).position(|text| text != first);
    let Some(other) = other else { return Ok(()) };
    let text = |rank: usize| {
        let text = texts.chunks_exact(CHOICE).nth(rank).unwrap_or_default();
        String::from_utf8_lossy(text).trim_end_matches('\0').to_owned()
    };
    let what = format!(
        "rank {other} has the plans {:?}, and rank 0 has {:?}; all ranks need the same: set them in the program or with {}",
        text(other),
        text(0),
        super::plans::VARIABLE
    );
    Err(CollectiveError::Setup(what.into()))
}

/// Makes the trials, and returns the table of rank 0.
fn measure(communicator: &Communicator) -> Result<PlanTable, CollectiveError> {
    let largest = largest(communicator)?;
    let crowded = communicator.shared.crowded;
    let tuner = || Tuner::new(communicator.size(), largest, BUDGET).crowded(crowded);
    let mut tuner = (communicator.rank() == 0).then(tuner);
    let mut buffer = touch(communicator)?;
    let began = Instant::now();
    loop {
        let next = tuner.as_mut().and_then(|tuner| if began.elapsed() < END { tuner.next() } else { None });
        let mut words = Trial::pack(next);
        communicator.broadcast(&mut words[..], 0).wait()?;
        let Some(trial) = Trial::unpack(words).map_err(|what| broken("trial", what))? else { break };
        let length = trial.bytes.div_ceil(size_of::<f32>());
        if buffer.len() != length {
            // The pool takes the memory back before it gives the next.
            drop(buffer);
            buffer = communicator.allocate::<f32>(length)?;
        }
        let (times, used) = run(communicator, trial, buffer)?;
        buffer = used;
        if let Some(tuner) = &mut tuner {
            tuner.record(&times);
        }
    }
    share(communicator, tuner.map(|tuner| tuner.table()))
}

/// Sends a message of the largest inline length through each slot of each lane. The first message that comes to a page of a slot takes
/// the time of a page fault at both ends, which would count against the algorithm that is tried first. Returns a buffer to use again.
fn touch(communicator: &Communicator) -> Result<Buffer<f32>, CollectiveError> {
    let lanes = LaneSettings::default();
    let plan = (Algorithm::OneShot, lanes.inline as usize);
    let mut buffer = communicator.allocate::<f32>(lanes.inline as usize / size_of::<f32>())?;
    for _ in 0..lanes.slots {
        buffer = communicator.all_reduce_by(plan, buffer, Reduction::Sum).wait()?;
    }
    Ok(buffer)
}

/// Returns the longest trial for which all ranks have memory.
fn largest(communicator: &Communicator) -> Result<usize, CollectiveError> {
    let mut bytes = LARGEST;
    while bytes > 8 && communicator.allocate::<u8>(bytes).is_err() {
        bytes /= 4;
    }
    let mut least = [bytes as u64];
    communicator.all_reduce(&mut least[..], Reduction::Min).wait()?;
    Ok(usize::try_from(least[0]).unwrap_or(bytes).min(bytes))
}

/// Makes the all-reduces of a trial. Returns their times. Each begins with a barrier, and its time is that of the slowest
/// rank: where ranks outnumber the cores, all-reduces that follow one another overlap, and a rank that comes last finds the elements of
/// all others.
fn run(
    communicator: &Communicator,
    trial: Trial,
    mut buffer: Buffer<f32>,
) -> Result<(Vec<Duration>, Buffer<f32>), CollectiveError> {
    let mut times = Vec::with_capacity(trial.repetitions as usize);
    let plan = (trial.algorithm, trial.piece);
    // The first one does not count: the plan is made, and the buffer may be new to the other ranks.
    buffer = communicator.all_reduce_by(plan, buffer, Reduction::Sum).wait()?;
    for repetition in 0..trial.repetitions {
        if communicator.shared.crowded && repetition.is_multiple_of(trial.repetitions.div_ceil(NAPS)) {
            std::thread::sleep(NAP);
        }
        communicator.barrier().wait()?;
        let start = Instant::now();
        buffer = communicator.all_reduce_by(plan, buffer, Reduction::Sum).wait()?;
        times.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    communicator.all_reduce(&mut times[..], Reduction::Max).wait()?;
    Ok((times.into_iter().map(Duration::from_nanos).collect(), buffer))
}

/// Gives all ranks the table of rank 0, which has one.
fn share(communicator: &Communicator, table: Option<PlanTable>) -> Result<PlanTable, CollectiveError> {
    let mut bytes = table.as_ref().map(PlanTable::encode).unwrap_or_default();
    let mut length = [bytes.len() as u64];
    communicator.broadcast(&mut length[..], 0).wait()?;
    let length = usize::try_from(length[0]).ok().filter(|length| *length <= PlanTable::MOST_BYTES);
    bytes.resize(length.ok_or_else(|| broken("table", "it is too long"))?, 0);
    communicator.broadcast(&mut bytes[..], 0).wait()?;
    match table {
        Some(table) => Ok(table),
        None => PlanTable::decode(&bytes).map_err(|error| broken("table", &error.to_string())),
    }
}

fn broken(what: &str, why: &str) -> CollectiveError {
    CollectiveError::Setup(format!("rank 0 sent a {what} of plans that can't be read: {why}").into())
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Barrier;
    use std::task::{Context, Waker};
    use std::time::Duration;

    use super::{CHOICE, agree, compare, largest};
    use crate::communicator::shared::{Polling, Which};
    use crate::communicator::{Communicator, PlanChoice};
    use crate::error::CollectiveError;
    use crate::group::{Group, Launch, Settings};

    /// Joins the group, without the agreement on the plans. Blocks this thread.
    fn join(rank: usize, ranks: usize, address: &str) -> (tokio::runtime::Runtime, Communicator) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let communicator = runtime.block_on(async {
            let group = Group::join(Launch::new(rank, ranks, address), Settings::default()).await?;
            let pool = crate::memory::MemoryPool::new(group.device(), crate::memory::MemoryPool::KEPT);
            Communicator::over(group, pool, Communicator::builder()).await
        });
        (runtime, communicator.unwrap())
    }

    #[test]
    fn a_rank_that_is_lost_while_the_plans_are_measured_is_named() {
        let address = support::free_address();
        let (address, all) = (&address, &Barrier::new(3));
        let rank = |rank: usize| {
            let (_runtime, communicator) = join(rank, 3, address);
            if rank == 2 {
                // Leaves before the first trial: on a busy machine any trial may be the last one that there is time for.
                compare(&communicator, &PlanChoice::Measured).unwrap();
                largest(&communicator).unwrap();
                drop(communicator);
                all.wait();
                return;
            }
            let error = agree(&communicator, &PlanChoice::Measured).unwrap_err();
            all.wait();
            assert!(error.to_string().contains("rank 2"), "rank {rank}: {error}");
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || rank(number))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }

    #[test]
    fn a_late_rank_ends_its_set_up_after_a_rank_that_went_on_has_failed() {
        let address = support::free_address();
        let (address, all, done) = (&address, &Barrier::new(2), &Barrier::new(2));
        let rank = |rank: usize| {
            let (runtime, communicator) = join(rank, 2, address);
            communicator.shared.engine(Which::Group).number_set_up();
            // Both ranks send their plans. Only rank 0 takes the answer before the group fails.
            if rank == 1 {
                let mut texts = vec![0_u8; 2 * CHOICE];
                texts[CHOICE..][..7].copy_from_slice(b"default");
                let mut gathered = communicator.all_gather(&mut texts[..]);
                let mut context = Context::from_waker(Waker::noop());
                assert!(Pin::new(&mut gathered).poll(&mut context).is_pending());
                let polling = Polling::new(&communicator.shared, Which::Group);
                all.wait();
                let reason = runtime.block_on(communicator.shared.group.failure().wait());
                // This is what a look of any thread does that finds nothing.
                communicator.shared.hear(reason, None, false);
                // This thread polls but does not run for a while. The progress thread must not end the operation meanwhile.
                std::thread::sleep(Duration::from_millis(300));
                let ended = gathered.wait().map(drop);
                drop(polling);
                done.wait();
                ended.unwrap();
                assert!(texts.starts_with(b"default"));
                return;
            }
            all.wait();
            let agreed = agree(&communicator, &PlanChoice::Default);
            communicator.shared.group.report(CollectiveError::Argument("a later call differs".into()));
            done.wait();
            agreed.unwrap();
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|number| scope.spawn(move || rank(number))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }
}
