//! What each launcher puts into the environment, and the port that all ranks of a job compute alike.

use std::ffi::OsString;

use crate::error::{CollectiveError, setting};
use crate::group::launch::Launch;

const RANK: &str = "RDMA_COLLECTIVE_RANK";
const SIZE: &str = "RDMA_COLLECTIVE_SIZE";
const ADDRESS: &str = "RDMA_COLLECTIVE_ADDRESS";
const HOST: &str = "RDMA_COLLECTIVE_HOST";

const LOOPBACK: &str = "127.0.0.1";

const SLURM: &str = "Slurm";
const TORCHRUN: &str = "torchrun";

/// What a launcher's variables say.
struct Launcher {
    /// The launcher's name, for messages.
    name: &'static str,
    rank: usize,
    size: usize,
    /// The host of rank 0, or the reason why it is not known.
    host: Result<String, &'static str>,
    port: u16,
    job: String,
    /// The number of processes that the launcher started on this host, if it says so.
    local: Option<usize>,
    /// The number of processes that the launcher started in all. `None` if it has not started this process,
    /// or does not say.
    started: Option<usize>,
    /// Who has started this process, as far as the launcher says so.
    starter: Starter,
}

/// Who has started a process of a launcher.
#[derive(PartialEq, Eq)]
enum Starter {
    /// The launcher itself, or one of its daemons.
    Unknown,
    /// A daemon that an outer launcher may have started on each host, also on hosts without ranks.
    Daemon,
    /// A launcher whose user said that it forms a group of its own.
    Standalone,
}

impl Launcher {
    /// Returns the rank by this launcher, for messages.
    fn describe(&self) -> String {
        format!("{} says rank {} of {}", self.name, self.rank, self.size)
    }
}

/// Reads this library's variables, and those of the launcher.
pub(super) fn read(variables: &Variables<'_>) -> Result<Launch, CollectiveError> {
    Ok(Launch { host: host(variables)?, ..rank_and_address(variables)? })
}

/// Names the host as the variable says, if the launch does not.
pub(super) fn with_host(mut launch: Launch, variables: &Variables<'_>) -> Result<Launch, CollectiveError> {
    if launch.host.is_none() {
        launch.host = host(variables)?;
    }
    Ok(launch)
}

fn host(variables: &Variables<'_>) -> Result<Option<String>, CollectiveError> {
    let name = |name: String| Launch::is_name(name.len()).then_some(name);
    variables.find(&[HOST], "takes a name of 1 to 256 bytes", name)
}

fn rank_and_address(variables: &Variables<'_>) -> Result<Launch, CollectiveError> {
    let (rank, size) = (variables.number(RANK)?, variables.number(SIZE)?);
    let address = variables.text(ADDRESS)?.map(checked_address).transpose()?;
    let info = match (rank, size, &address) {
        (Some(_), Some(_), Some(_)) => None,
        (Some(_), Some(1), None) => None,
        _ => launcher(variables, rank.is_some())?,
    };
    let Some(info) = info else { return without_launcher(rank, size, address) };
    let rank = rank.unwrap_or(info.rank);
    let size = size.unwrap_or(info.size);
    let address = match (address, info.host) {
        (Some(address), _) => address,
        (None, Ok(host)) => joined(&host, info.port),
        (None, Err(reason)) => {
            let launcher = info.name;
            return Err(setting(format!(
                "{launcher} does not tell where rank 0 runs: {reason}. Set {ADDRESS} to host:port of rank 0"
            )));
        }
    };
    Launch::new(rank, size, address).job(info.job).checked()
}

/// Makes the launch from this library's variables alone.
fn without_launcher(
    rank: Option<usize>,
    size: Option<usize>,
    address: Option<String>,
) -> Result<Launch, CollectiveError> {
    let missing =
        [(RANK, rank.is_none()), (SIZE, size.is_none()), (ADDRESS, address.is_none() && size != Some(1))];
    let missing: Vec<&str> =
        missing.into_iter().filter(|(_, missing)| *missing).map(|(name, _)| name).collect();
    match (rank, size) {
        (Some(rank), Some(size)) if missing.is_empty() => {
            Launch::new(rank, size, address.unwrap_or_else(|| joined(LOOPBACK, 0))).checked()
        }
        _ if missing.len() == 3 => Err(setting(format!(
            "no launcher started this process: start it with torchrun, mpirun or srun, or set {RANK}, {SIZE} and {ADDRESS}"
        ))),
        _ => {
            let verb = if missing.len() == 1 { "is" } else { "are" };
            let names = missing.join(" and ");
            Err(setting(format!("no launcher started this process, and {names} {verb} not set")))
        }
    }
}

/// Asks the launchers in turn. The first that is there counts. Processes inherit variables, so another
/// launcher that is there has started the first one, or was started by it. In the second case the numbers of
/// the first would be wrong, so it is an error if the other launcher can't have started the first one. With
/// `is_numbered` this library's variable numbers the process, so launchers may contradict each other.
fn launcher(variables: &Variables<'_>, is_numbered: bool) -> Result<Option<Launcher>, CollectiveError> {
    type Read = fn(&Variables<'_>) -> Result<Option<Launcher>, CollectiveError>;
    let mut others = [torchrun as Read, open_mpi, hydra, slurm].into_iter();
    let Some(mut first) = others.by_ref().find_map(|read| read(variables).transpose()).transpose()? else {
        return Ok(None);
    };
    // Variables of a launcher that does not count may be incomplete.
    for other in others.filter_map(|read| read(variables).ok().flatten()) {
        if (first.rank, first.size) == (other.rank, other.size) {
            if first.host.is_err() {
                first = other;
            }
        } else if !is_numbered && !may_be_started_by(&first, &other) {
            return Err(contradiction(&first, &other.describe()));
        }
    }
    // Slurm's variables are in all processes of a job, also in those of launchers that this library does not
    // know.
    for name in ["PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"] {
        if let Some(rank) = variables.text(name)?
            && first.name == SLURM
            && !is_numbered
            && rank != first.rank.to_string()
        {
            return Err(contradiction(&first, &format!("{name} is {rank}")));
        }
    }
    Ok(Some(first))
}

/// Returns whether the processes of `outer` may be the agents, or proxies, that have started the processes of
/// `inner`: there are as many of both, or `outer` has started one for each host, and not more than `inner`
/// has processes. The mpirun of Open MPI and of Hydra may have started daemons also on hosts without
/// processes.
fn may_be_started_by(inner: &Launcher, outer: &Launcher) -> bool {
    let Some(started) = outer.started else { return true };
    let agents = inner.local.filter(|local| *local > 0).map(|local| inner.size / local);
    let is_mpirun_in_slurm = outer.name == SLURM && inner.name != TORCHRUN;
    let on_several_hosts = inner.local.is_some_and(|local| local < inner.size);
    let has_daemons = is_mpirun_in_slurm && (on_several_hosts || inner.starter == Starter::Daemon);
    started == 1
        || inner.starter == Starter::Standalone
        || agents == Some(started)
        || has_daemons && outer.local == Some(1)
        || started <= inner.size && outer.local.is_none_or(|local| local == 1)
}

fn contradiction(first: &Launcher, second: &str) -> CollectiveError {
    let first = first.describe();
    setting(format!("{first}, and {second}: set {RANK}, {SIZE} and {ADDRESS}"))
}

/// Reads the variables of torchrun:
/// <https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables>.
fn torchrun(variables: &Variables<'_>) -> Result<Option<Launcher>, CollectiveError> {
    // Other programs have a RANK too.
    if variables.text("RANK")?.is_none() || variables.text("WORLD_SIZE")?.is_none() {
        return Ok(None);
    }
    let rank = required(variables, "RANK")?;
    let size = required(variables, "WORLD_SIZE")?;
    let local = variables.number("LOCAL_WORLD_SIZE")?;
    let host = match variables.text("MASTER_ADDR")? {
        _ if local == Some(size) => Ok(LOOPBACK.to_owned()),
        Some(host) if !host.is_empty() => Ok(host),
        _ => Err("MASTER_ADDR is not set"),
    };
    let master = variables.port("MASTER_PORT")?;
    let run = variables.text("TORCHELASTIC_RUN_ID")?.unwrap_or_default();
    let restart = variables.text("TORCHELASTIC_RESTART_COUNT")?.unwrap_or_default();
    let number = master.map(|port| port.to_string()).unwrap_or_default();
    let job = format!("torchrun {run} {number} {restart}");
    let port = port_of_job(&job, master);
    let starter = if local == Some(size) && is_uuid(&run) { Starter::Standalone } else { Starter::Unknown };
    Ok(Some(Launcher { name: TORCHRUN, rank, size, host, port, job, local, started: Some(size), starter }))
}

/// Returns whether `run` is such a name as `torchrun --standalone` draws. Without this option it is `none`,
/// or the user's.
fn is_uuid(run: &str) -> bool {
    let groups = run.split('-').map(str::len).eq([8, 4, 4, 4, 12]);
    groups && run.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

/// Reads the variables of Open MPI:
/// <https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables>.
fn open_mpi(variables: &Variables<'_>) -> Result<Option<Launcher>, CollectiveError> {
    let Some(rank) = variables.number("OMPI_COMM_WORLD_RANK")? else { return Ok(None) };
    let size = required(variables, "OMPI_COMM_WORLD_SIZE")?;
    let local = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    const URI: &str = "OMPI_MCA_orte_hnp_uri";
    let uri = variables.text(URI)?;
    let daemon = variables.text("OMPI_MCA_orte_local_daemon_uri")?;
    // mpirun is the daemon of its own host.
    let starter =
        if daemon.is_some() && uri.is_some() && daemon != uri { Starter::Daemon } else { Starter::Unknown };
    let host = match uri {
        _ if local == Some(size) => Ok(LOOPBACK.to_owned()),
        Some(uri) => Ok(host_of_uri(&uri).ok_or_else(|| refuse(URI, &uri, "takes NUMBER;tcp://HOST:PORT"))?),
        None => Err("OMPI_MCA_orte_hnp_uri, which names mpirun's host, is not set"),
    };
    let job = variables.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])?.unwrap_or_default();
    let job = format!("Open MPI {job}");
    let port = port_of_job(&job, None);
    Ok(Some(Launcher { name: "Open MPI", rank, size, host, port, job, local, started: Some(size), starter }))
}

/// Returns the first host of `1364852736.0;tcp://10.0.0.1,10.1.0.1:55597;tcp6://[fd00::1]:46003`.
fn host_of_uri(uri: &str) -> Option<String> {
    let tcp = uri.split(';').find_map(|part| part.strip_prefix("tcp://"));
    let rest = tcp.or_else(|| uri.split(';').find_map(|part| part.strip_prefix("tcp6://")))?;
    let (hosts, _) = rest.rsplit_once(':')?;
    let host = hosts.trim_start_matches('[').trim_end_matches(']').split(',').next()?;
    (!host.is_empty()).then(|| host.to_owned())
}

/// Reads the variables of Hydra, the mpirun of MPICH and Intel MPI:
/// <https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md>. Slurm's srun sets some of them too, with
/// `--mpi=pmi2`.
fn hydra(variables: &Variables<'_>) -> Result<Option<Launcher>, CollectiveError> {
    let Some(rank) = variables.number("PMI_RANK")? else { return Ok(None) };
    let Some(size) = variables.number("PMI_SIZE")? else { return Ok(None) };
    let local = variables.number("MPI_LOCALNRANKS")?;
    // What all ranks have alike, and other jobs have not. Each host has a proxy of its own, which may be a
    // step of Slurm.
    let (host, alike): (_, &[&str]) = if local == Some(size) {
        (Ok(LOOPBACK.to_owned()), &["PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_PORT"])
    } else {
        (Err("its variables do not name hosts"), &["PMI_JOBID", "SLURM_JOB_ID"])
    };
    let mut job = "Hydra".to_owned();
    for name in alike {
        job = format!("{job} {}", variables.text(name)?.unwrap_or_default());
    }
    let port = port_of_job(&job, None);
    let name = "Hydra (the mpirun of MPICH or Intel MPI)";
    let (started, starter) = (Some(size), Starter::Unknown);
    Ok(Some(Launcher { name, rank, size, host, port, job, local, started, starter }))
}

/// Reads the variables of Slurm: <https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES>.
fn slurm(variables: &Variables<'_>) -> Result<Option<Launcher>, CollectiveError> {
    let Some(rank) = variables.number("SLURM_PROCID")? else { return Ok(None) };
    // Steps with the last numbers are the batch script and the shell of salloc.
    let step = variables.first(&["SLURM_STEP_ID", "SLURM_STEPID"])?;
    let step = step.filter(|step| step.parse().is_ok_and(|step: u32| step < 0xffff_fff0));
    let tasks = variables.number("SLURM_STEP_NUM_TASKS")?.filter(|_| step.is_some());
    let Some(size) = tasks.map_or_else(|| variables.number("SLURM_NTASKS"), |tasks| Ok(Some(tasks)))? else {
        return Err(setting("SLURM_PROCID is set, and SLURM_NTASKS is not"));
    };
    // In a batch script Slurm sets the variables of task 0, and starts no other tasks. A script may start and
    // number ranks itself.
    if step.is_none() && variables.number(SIZE)?.unwrap_or(size) > 1 && variables.number(RANK)?.is_none() {
        return Err(setting(format!(
            "this process runs in a batch script of Slurm, and not as one of {size} tasks: start it with srun, or set {RANK}, \
             {SIZE} and {ADDRESS}"
        )));
    }
    let nodes = variables.first_number(&["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"])?;
    let listed = variables.first(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"])?;
    let host = match listed.as_deref().and_then(first_host) {
        _ if nodes == Some(1) => Ok(LOOPBACK.to_owned()),
        Some(host) => Ok(host),
        None => variables
            .text("SLURM_LAUNCH_NODE_IPADDR")?
            .ok_or("neither SLURM_JOB_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is set"),
    };
    let job = variables.first(&["SLURM_JOB_ID", "SLURM_JOBID"])?.unwrap_or_default();
    let job = format!("Slurm {job}.{}", step.unwrap_or_default());
    let port = port_of_job(&job, None);
    let local = tasks.zip(nodes).filter(|(_, nodes)| *nodes > 0).map(|(tasks, nodes)| tasks.div_ceil(nodes));
    // With `--pty` srun starts task 0 as an interactive shell. The other tasks have no terminal.
    let is_shell = rank == 0 && variables.text("SLURM_PTY_PORT")?.is_some();
    let (started, starter) = (tasks.filter(|_| !is_shell), Starter::Unknown);
    Ok(Some(Launcher { name: SLURM, rank, size, host, port, job, local, started, starter }))
}

/// Returns the first host of a list of Slurm's: `rack[01-04,7]n[1-2],login` gives `rack01n1`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut letters = list.trim().chars();
    while let Some(letter) = letters.next() {
        match letter {
            ',' => break,
            '[' => {
                let range: String = letters.by_ref().take_while(|letter| *letter != ']').collect();
                host.push_str(range.split([',', '-']).next()?);
            }
            letter => host.push(letter),
        }
    }
    (!host.is_empty()).then_some(host)
}

/// Returns a number that the launcher always sets.
fn required(variables: &Variables<'_>, name: &str) -> Result<usize, CollectiveError> {
    variables.number(name)?.ok_or_else(|| setting(format!("the launcher did not set {name}")))
}

/// Returns `host:port`, with brackets around an address of IPv6.
fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn checked_address(address: String) -> Result<String, CollectiveError> {
    let parts = address.rsplit_once(':');
    match parts.map(|(host, port)| (host, port.parse::<u16>())) {
        Some((host, Ok(1..))) if !host.is_empty() => Ok(address),
        _ => Err(refuse(ADDRESS, &address, "takes host:port")),
    }
}

/// Reads variables from a source.
pub(super) struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

impl<'a> Variables<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<OsString>) -> Self {
        Self { lookup }
    }

    /// Returns the value of the first variable that is set; `None` if none is. `parse` returns `None` for a
    /// value that is not `accepted`.
    fn find<T>(
        &self,
        names: &[&str],
        accepted: &str,
        parse: impl Fn(String) -> Option<T>,
    ) -> Result<Option<T>, CollectiveError> {
        let value = |name: &&str| (self.lookup)(name).map(|value| ((*name).to_owned(), value));
        let Some((name, value)) = names.iter().find_map(value) else { return Ok(None) };
        let text = value
            .into_string()
            .map_err(|raw| refuse(&name, &raw.to_string_lossy(), "takes text in UTF-8"))?;
        parse(text.clone()).map(Some).ok_or_else(|| refuse(&name, &text, accepted))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<String>, CollectiveError> {
        self.first(&[name])
    }

    /// Returns the text of the first variable that is set.
    pub(super) fn first(&self, names: &[&str]) -> Result<Option<String>, CollectiveError> {
        self.find(names, "", Some)
    }

    /// Returns a variable that is a number.
    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, CollectiveError> {
        self.first_number(&[name])
    }

    /// Returns the first variable that is set, which is a number.
    pub(super) fn first_number(&self, names: &[&str]) -> Result<Option<usize>, CollectiveError> {
        self.find(names, "takes a number", |text| text.parse::<u32>().ok().map(|number| number as usize))
    }

    pub(super) fn port(&self, name: &str) -> Result<Option<u16>, CollectiveError> {
        self.find(&[name], "takes a number from 1 to 65535", |text| {
            text.parse().ok().filter(|port| *port != 0)
        })
    }
}

/// Makes the error of a bad value.
pub(super) fn refuse(name: &str, value: &str, accepted: &str) -> CollectiveError {
    setting(format!("{name}={value:?}: {accepted}"))
}

/// The first of the ports. Linux gives ports from 32768 on to outgoing connections, so these are below.
const FIRST_PORT: u16 = 20_000;
const PORTS: u64 = 12_000;

/// Returns the port of a job, which is not `taken`. Two jobs of one host get the same port in one case of
/// 12000.
pub(super) fn port_of_job(job: &str, taken: Option<u16>) -> u16 {
    // FNV-1a, because a hash of the standard library may differ between processes.
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let nth = |hash: u64| FIRST_PORT + (hash % PORTS) as u16;
    let port = nth(hash);
    if Some(port) == taken { nth(hash.wrapping_add(1)) } else { port }
}

#[cfg(test)]
mod tests {
    use super::{FIRST_PORT, PORTS, port_of_job};

    #[test]
    fn ports_are_in_range_spread_and_not_the_taken_one() {
        let ports: std::collections::BTreeSet<u16> =
            (0..1000).map(|job| port_of_job(&job.to_string(), None)).collect();
        assert!(ports.len() > 900, "only {} ports for 1000 jobs", ports.len());
        let last = FIRST_PORT + PORTS as u16 - 1;
        assert!(ports.iter().all(|port| (FIRST_PORT..=last).contains(port)));
        for job in 0..1000 {
            let job = job.to_string();
            let port = port_of_job(&job, None);
            let other = port_of_job(&job, Some(port));
            assert!(other != port && (FIRST_PORT..=last).contains(&other));
        }
    }
}
