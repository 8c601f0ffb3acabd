//! What this process may use of the machine's CPUs: its affinity mask, and the CPU limit of its control
//! groups.
//!
//! `std::thread::available_parallelism` and the crate `num_cpus` read the same files, but return whole CPUs:
//! half a CPU is one, as one and a half is for the former. A thread that spins on less than one CPU takes the
//! time of the thread that it waits for, so the difference decides.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity};
use tonic_rdma_verbs::unstable::lock;

/// What this process may use of the machine's CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processors {
    /// The CPUs that the main thread or the thread that has read the mask may run on. Affinity belongs to
    /// threads. That of the main thread is what `taskset` and a container's set of CPUs give the process.
    /// The mask of one other thread would say too little if this thread is pinned, such as one that polls,
    /// and that of the main thread alone if a program has pinned this thread.
    pub cpus: u16,
    /// The physical cores that these CPUs are threads of. A CPU whose core the system does not name counts as
    /// a core.
    pub cores: u16,
    /// The CPU time that the control groups of the process allow, in thousandths of a CPU; `None` without a
    /// limit. It is the smallest of all limits from the process's group up to the root.
    pub limit: Option<u32>,
}

/// The values of [`Processors::current`], packed; zero before they are read.
static CURRENT: AtomicU64 = AtomicU64::new(0);
static READER: LazyLock<Mutex<Reader>> = LazyLock::new(|| Mutex::new(Reader::new()));

impl Processors {
    /// Shortest time between two reads.
    const AGAIN: Duration = Duration::from_secs(5);

    /// Returns the values that were read last. Only the first call of the process reads them.
    #[inline]
    pub fn current() -> Self {
        match CURRENT.load(Ordering::Relaxed) {
            0 => lock(&READER).read(),
            packed => Self {
                cpus: (packed >> 48) as u16,
                cores: (packed >> 32) as u16,
                limit: (packed as u32 != 0).then_some(packed as u32),
            },
        }
    }

    /// Reads the values again if the last read is some seconds ago, because the limits of a running container
    /// can be changed. This opens files, so call it before a sleep, and not between two messages.
    pub fn refresh(now: Instant) {
        if let Ok(mut reader) = READER.try_lock()
            && now >= reader.next
        {
            reader.next = now + Self::AGAIN;
            reader.read();
        }
    }

    /// Returns the folders of the control groups whose limits count: of each tree with CPU limits that is mounted,
    /// those from the process's own group up to the root.
    pub fn groups() -> Vec<PathBuf> {
        lock(&READER).groups.iter().map(|(_, folder)| folder.clone()).collect()
    }

    /// Returns whether the limit is below two CPUs. Then what a thread polls away is missing elsewhere: in the
    /// other threads of this process, and at last in itself.
    #[inline]
    pub fn is_limited(self) -> bool {
        self.limit.is_some_and(|limit| limit < 2000)
    }

    /// Returns the CPUs that the process can keep busy at a time, in thousandths of a CPU: those of its mask,
    /// or fewer by its limit.
    #[inline]
    pub fn usable(self) -> u32 {
        let cpus = u32::from(self.cpus) * 1000;
        self.limit.map_or(cpus, |limit| limit.min(cpus))
    }
}

/// What is read again and again, and what stays as it was read first: a process that moves to another group
/// keeps the limits of the first one.
#[derive(Debug)]
struct Reader {
    groups: Vec<(Hierarchy, PathBuf)>,
    cpus: Vec<usize>,
    cores: usize,
    /// Not read again before this.
    next: Instant,
}

impl Reader {
    fn new() -> Self {
        let text = |path| std::fs::read_to_string(path).unwrap_or_default();
        let groups = groups(&text("/proc/self/mountinfo"), &text("/proc/self/cgroup"));
        Self { groups, cpus: Vec::new(), cores: 0, next: Instant::now() + Processors::AGAIN }
    }

    /// Reads all, for [`Processors::current`], too.
    fn read(&mut self) -> Processors {
        let cpus = allowed();
        if cpus != self.cpus {
            self.cores = cores(&cpus, |cpu| {
                let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
                std::fs::read_to_string(path).unwrap_or_default()
            });
            self.cpus = cpus;
        }
        let file = |folder: &Path, name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let limits =
            self.groups.iter().filter_map(|(hierarchy, folder)| hierarchy.limit(|name| file(folder, name)));
        // A system that does not tell the mask has at least one CPU.
        let count = |number: usize| u16::try_from(number).unwrap_or(u16::MAX).max(1);
        let read = Processors { cpus: count(self.cpus.len()), cores: count(self.cores), limit: limits.min() };
        let counts = u64::from(read.cpus) << 48 | u64::from(read.cores) << 32;
        CURRENT.store(counts | u64::from(read.limit.unwrap_or(0)), Ordering::Relaxed);
        read
    }
}

/// Returns the CPUs that the main thread or this thread may run on.
fn allowed() -> Vec<usize> {
    let masks = [Some(getpid()), None].map(|thread| sched_getaffinity(thread).unwrap_or_default());
    (0..CpuSet::MAX_CPU).filter(|cpu| masks.iter().any(|mask| mask.is_set(*cpu))).collect()
}

/// Returns the number of physical cores of `cpus`. `siblings` names the threads of a CPU's core.
fn cores(cpus: &[usize], siblings: impl Fn(usize) -> String) -> usize {
    let has_earlier =
        |cpu: usize| ranges(&siblings(cpu)).flatten().any(|other| other < cpu && cpus.contains(&other));
    cpus.iter().filter(|cpu| !has_earlier(**cpu)).count()
}

/// Parses the kernel's notation for sets of CPUs: `0-3,8`.
fn ranges(text: &str) -> impl Iterator<Item = std::ops::RangeInclusive<usize>> + '_ {
    text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse::<usize>().ok()?);
        (last < CpuSet::MAX_CPU).then_some(first..=last)
    })
}

/// A tree of control groups that may limit CPU time. On hybrid systems both are mounted, and one of them has
/// the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hierarchy {
    /// Version 1, with the controller `cpu`.
    One,
    Two,
}

impl Hierarchy {
    /// Returns the hierarchy of a mount, by its type and its options.
    fn of_mount(kind: &str, options: &str) -> Option<Self> {
        match kind {
            "cgroup2" => Some(Self::Two),
            "cgroup" if options.split(',').any(|option| option == "cpu") => Some(Self::One),
            _ => None,
        }
    }

    /// Returns the path of the process's group, from the text of `/proc/self/cgroup`.
    fn group(self, cgroups: &str) -> Option<&str> {
        cgroups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let is_wanted = match self {
                Self::One => controllers.split(',').any(|controller| controller == "cpu"),
                Self::Two => controllers.is_empty(),
            };
            is_wanted.then_some(path)
        })
    }

    /// Returns the limit of one group, in thousandths of a CPU. `file` returns a file of the group.
    fn limit(self, file: impl Fn(&str) -> Option<String>) -> Option<u32> {
        let text = match self {
            Self::One => file("cpu.cfs_quota_us")? + " " + &file("cpu.cfs_period_us")?,
            Self::Two => file("cpu.max")?,
        };
        let mut fields = text.split_whitespace();
        // `max` and `-1` are no limit.
        let quota: u64 = fields.next()?.parse().ok()?;
        let period = fields.next()?.parse::<u64>().ok().filter(|period| *period > 0)?;
        Some(u32::try_from(quota.saturating_mul(1000) / period).unwrap_or(u32::MAX).max(1))
    }
}

/// Returns the folders of the process's groups, each from its own up to the root of what is mounted.
fn groups(mountinfo: &str, cgroups: &str) -> Vec<(Hierarchy, PathBuf)> {
    let mounts: Vec<_> = mountinfo.lines().filter_map(mount).collect();
    let mut groups = Vec::new();
    for hierarchy in [Hierarchy::One, Hierarchy::Two] {
        let Some(path) = hierarchy.group(cgroups) else { continue };
        let of_this = || mounts.iter().filter(|(other, ..)| *other == hierarchy);
        // A process outside the root of its namespace, or of what is mounted, can't see its own group.
        let visible = |(_, root, point): &(Hierarchy, &str, &'_ str)| {
            let below = Path::new(path).strip_prefix(root).ok()?;
            let is_below = !below.starts_with("..");
            is_below.then(|| (Path::new(point).to_owned(), Path::new(point).join(below)))
        };
        let root = |(.., point): &(Hierarchy, &str, &str)| (PathBuf::from(point), PathBuf::from(point));
        let Some((top, own)) = of_this().find_map(visible).or_else(|| of_this().next().map(root)) else {
            continue;
        };
        let up = own.ancestors().take_while(|folder| folder.starts_with(&top));
        groups.extend(up.map(|folder| (hierarchy, folder.to_owned())));
    }
    groups
}

/// Parses a line of `/proc/self/mountinfo`: the hierarchy, which group is mounted, and where.
fn mount(line: &str) -> Option<(Hierarchy, &str, &str)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(3);
    let mut system = system.split(' ');
    let (kind, options) = (system.next()?, system.nth(1)?);
    Some((Hierarchy::of_mount(kind, options)?, fields.next()?, fields.next()?))
}

#[cfg(test)]
#[path = "processors_tests.rs"]
mod tests;
