//! What each launcher puts into the environment.

use crate::error::CollectiveError;
use crate::group::launch::variables::{Variables, refuse};
use crate::group::launch::{Launch, port, setup};

const RANK: &str = "RDMA_COLLECTIVE_RANK";
const SIZE: &str = "RDMA_COLLECTIVE_SIZE";
const ADDRESS: &str = "RDMA_COLLECTIVE_ADDRESS";

const LOOPBACK: &str = "127.0.0.1";

/// What a launcher says.
struct Said {
    /// The launcher's name, for messages.
    launcher: &'static str,
    rank: usize,
    size: usize,
    /// The host of rank 0, or the reason why it is not known.
    host: Result<String, &'static str>,
    port: u16,
    job: String,
}

/// Reads this library's variables, and those of the launcher.
pub(super) fn read(variables: &Variables<'_>) -> Result<Launch, CollectiveError> {
    let (rank, size) = (variables.number(RANK)?, variables.number(SIZE)?);
    let address = variables.text(ADDRESS)?.map(checked_address).transpose()?;
    let said = match (rank, size, &address) {
        (Some(_), Some(_), Some(_)) => None,
        (Some(_), Some(1), None) => None,
        _ => launcher(variables)?,
    };
    let Some(said) = said else { return without_launcher(rank, size, address) };
    let rank = rank.unwrap_or(said.rank);
    let size = size.unwrap_or(said.size);
    let address = match (address, said.host) {
        (Some(address), _) => address,
        (None, Ok(host)) => joined(&host, said.port),
        (None, Err(reason)) => {
            let launcher = said.launcher;
            return Err(setup(format!(
                "{launcher} does not tell where rank 0 runs: {reason}. Set {ADDRESS} to host:port of rank 0"
            )));
        }
    };
    checked(Launch { rank, size, address, job: said.job })
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
            checked(Launch::new(rank, size, address.unwrap_or_else(|| joined(LOOPBACK, 0))))
        }
        _ if missing.len() == 3 => Err(setup(format!(
            "no launcher started this process: start it with torchrun, mpirun or srun, or set {RANK}, {SIZE} and {ADDRESS}"
        ))),
        _ => {
            let verb = if missing.len() == 1 { "is" } else { "are" };
            let names = missing.join(" and ");
            Err(setup(format!("no launcher started this process, and {names} {verb} not set")))
        }
    }
}

/// Asks the launchers in turn.
fn launcher(variables: &Variables<'_>) -> Result<Option<Said>, CollectiveError> {
    if let Some(said) = torchrun(variables)? {
        return Ok(Some(said));
    }
    if let Some(said) = open_mpi(variables)? {
        return Ok(Some(said));
    }
    slurm(variables)
}

/// Reads the variables of torchrun: <https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables>.
fn torchrun(variables: &Variables<'_>) -> Result<Option<Said>, CollectiveError> {
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
    Ok(Some(Said { launcher: "torchrun", rank, size, host, port: port::of(&job, master), job }))
}

/// Reads the variables of Open MPI: <https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables>.
fn open_mpi(variables: &Variables<'_>) -> Result<Option<Said>, CollectiveError> {
    let Some(rank) = variables.number("OMPI_COMM_WORLD_RANK")? else { return Ok(None) };
    let size = required(variables, "OMPI_COMM_WORLD_SIZE")?;
    let local = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    const URI: &str = "OMPI_MCA_orte_hnp_uri";
    let host = match variables.text(URI)? {
        _ if local == Some(size) => Ok(LOOPBACK.to_owned()),
        Some(uri) => Ok(host_of_uri(&uri).ok_or_else(|| refuse(URI, &uri, "takes NUMBER;tcp://HOST:PORT"))?),
        None => Err("OMPI_MCA_orte_hnp_uri, which names mpirun's host, is not set"),
    };
    let job = variables.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])?.unwrap_or_default();
    let job = format!("Open MPI {job}");
    Ok(Some(Said { launcher: "Open MPI", rank, size, host, port: port::of(&job, None), job }))
}

/// Returns the first host of `1364852736.0;tcp://10.0.0.1,10.1.0.1:55597;tcp6://[fd00::1]:46003`.
fn host_of_uri(uri: &str) -> Option<String> {
    let tcp = uri.split(';').find_map(|part| part.strip_prefix("tcp://"));
    let rest = tcp.or_else(|| uri.split(';').find_map(|part| part.strip_prefix("tcp6://")))?;
    let (hosts, _) = rest.rsplit_once(':')?;
    let host = hosts.trim_start_matches('[').trim_end_matches(']').split(',').next()?;
    (!host.is_empty()).then(|| host.to_owned())
}

/// Reads the variables of Slurm: <https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES>.
fn slurm(variables: &Variables<'_>) -> Result<Option<Said>, CollectiveError> {
    let Some(rank) = variables.number("SLURM_PROCID")? else { return Ok(None) };
    let Some(size) = variables.first_number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])? else {
        return Err(missing("SLURM_PROCID", "SLURM_NTASKS"));
    };
    let step = variables.first(&["SLURM_STEP_ID", "SLURM_STEPID"])?;
    // In a batch script Slurm sets the variables of task 0, and starts no other tasks. A script may start and number ranks itself.
    if step.is_none() && variables.number(SIZE)?.unwrap_or(size) > 1 && variables.number(RANK)?.is_none() {
        return Err(setup(format!(
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
    Ok(Some(Said { launcher: "Slurm", rank, size, host, port: port::of(&job, None), job }))
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
    variables.number(name)?.ok_or_else(|| setup(format!("the launcher did not set {name}")))
}

fn missing(is_set: &str, is_not: &str) -> CollectiveError {
    setup(format!("{is_set} is set, and {is_not} is not"))
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

fn checked(launch: Launch) -> Result<Launch, CollectiveError> {
    launch.check()?;
    Ok(launch)
}
