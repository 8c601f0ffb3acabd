//! How a process learns its rank, the number of ranks, and where they meet.

mod launchers;

use std::ffi::OsString;

use self::launchers::Variables;
use crate::error::{CollectiveError, setting};

/// The rank of this process, the number of ranks, and the address at which they meet.
///
/// ```
/// use tonic_rdma_collective::Launch;
///
/// // Each of four processes makes its own, with its own rank.
/// let launch = Launch::new(2, 4, "10.0.0.1:29000");
/// assert_eq!((launch.rank(), launch.size(), launch.address()), (2, 4, "10.0.0.1:29000"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    rank: usize,
    size: usize,
    address: String,
    job: String,
    host: Option<String>,
}

impl Launch {
    /// The largest number of ranks.
    pub const MAX_SIZE: usize = 4096;

    /// Makes the launch of rank `rank` of `size`. Rank 0 listens on `address`, `host:port`, and all other
    /// ranks call there, so they must reach rank 0 under this name.
    ///
    /// ```
    /// use tonic_rdma_collective::Launch;
    ///
    /// let launch = Launch::new(0, 1, "127.0.0.1:0");
    /// assert_eq!(launch.size(), 1);
    /// ```
    pub fn new(rank: usize, size: usize, address: impl Into<String>) -> Self {
        Self { rank, size, address: address.into(), job: String::new(), host: None }
    }

    /// Sets the name of the job, which is equal on all ranks. Rank 0 refuses processes of another job.
    /// Default: empty.
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.job = job.into();
        self
    }

    /// Names the host of this rank. Plans for ranks of several hosts take ranks with one name as those of one
    /// host, so a name may also stand for a rack or a socket, or for a host that a test simulates. Ranks without
    /// a name count by the variable `RDMA_COLLECTIVE_HOST`, or else by the system on which they run. It takes
    /// 1 to 256 bytes.
    ///
    /// ```
    /// use tonic_rdma_collective::Launch;
    ///
    /// let launch = Launch::new(3, 4, "10.0.0.1:29000").host("rack 2");
    /// assert_eq!(launch.host_name(), Some("rack 2"));
    /// ```
    pub fn host(mut self, name: impl Into<String>) -> Self {
        self.host = Some(name.into());
        self
    }

    /// Reads the environment that a launcher made. In this order, the first that is there counts:
    ///
    /// | launcher | variables | rank 0 listens on |
    /// |---|---|---|
    /// | torchrun | `RANK`, `WORLD_SIZE` | loopback if `LOCAL_WORLD_SIZE` is all ranks, else `MASTER_ADDR`; the port is computed from `MASTER_PORT`, `TORCHELASTIC_RUN_ID` and `TORCHELASTIC_RESTART_COUNT` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | loopback if `OMPI_COMM_WORLD_LOCAL_SIZE` is all ranks, else mpirun's host of `OMPI_MCA_orte_hnp_uri`; the port is computed from `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid` |
    /// | Hydra: mpirun of MPICH or Intel MPI | `PMI_RANK`, `PMI_SIZE` | loopback if `MPI_LOCALNRANKS` is all ranks, else set `RDMA_COLLECTIVE_ADDRESS`; the port is computed from `PMI_JOBID`, `SLURM_JOB_ID`, `SLURM_STEP_ID` and `PMI_PORT`, as far as they are set |
    /// | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | loopback on one node, else the first host of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, else `SLURM_LAUNCH_NODE_IPADDR`; the port is computed from `SLURM_JOB_ID` and `SLURM_STEP_ID` |
    ///
    /// The variables of several launchers may be there, because the processes of one run the other. It is an
    /// error if the launcher that counts may be the outer one: if another one has started more processes, for
    /// example.
    ///
    /// `RDMA_COLLECTIVE_RANK`, `RDMA_COLLECTIVE_SIZE` and `RDMA_COLLECTIVE_ADDRESS` each override what the
    /// launcher says, and do without a launcher if all three are set. `RDMA_COLLECTIVE_HOST` is
    /// [`host`](Self::host).
    ///
    /// A computed port lies between 20000 and 31999, below the ports that Linux gives to outgoing
    /// connections. It is never `MASTER_PORT`, because torchrun's agent listens there.
    ///
    /// ```
    /// use tonic_rdma_collective::Launch;
    ///
    /// match Launch::from_env() {
    ///     Ok(launch) => println!("rank {} of {}", launch.rank(), launch.size()),
    ///     Err(error) => println!("{error}"), // no launcher started this process
    /// }
    /// ```
    ///
    /// # Errors
    /// [`InvalidSetting`](crate::CollectiveErrorKind::InvalidSetting): a variable is missing or has a bad
    /// value, or two launchers contradict each other. The message names them.
    pub fn from_env() -> Result<Self, CollectiveError> {
        tonic_rdma::unstable::warn_of_unknown_variables();
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the variables of [`from_env`](Self::from_env) from any source.
    ///
    /// ```
    /// use tonic_rdma_collective::Launch;
    ///
    /// let launch = Launch::from_variables(|name| match name {
    ///     "OMPI_COMM_WORLD_RANK" => Some("1".into()),
    ///     "OMPI_COMM_WORLD_SIZE" | "OMPI_COMM_WORLD_LOCAL_SIZE" => Some("4".into()),
    ///     "PMIX_NAMESPACE" => Some("1364852737".into()),
    ///     _ => None,
    /// })?;
    /// assert_eq!((launch.rank(), launch.size()), (1, 4));
    /// assert!(launch.address().starts_with("127.0.0.1:"));
    /// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    /// [`InvalidSetting`](crate::CollectiveErrorKind::InvalidSetting): a variable is missing or has a bad
    /// value. The message names it.
    pub fn from_variables(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, CollectiveError> {
        launchers::read(&Variables::new(&lookup))
    }

    /// Returns the rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the address of rank 0.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the name of the job.
    pub fn job_name(&self) -> &str {
        &self.job
    }

    /// Returns the name of the host, if one was given.
    pub fn host_name(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// Names the host as `RDMA_COLLECTIVE_HOST` says, if the launch does not.
    pub(crate) fn with_host_from(
        self,
        lookup: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, CollectiveError> {
        launchers::with_host(self, &Variables::new(&lookup))
    }

    /// Returns the launch, or an error if the numbers do not fit.
    pub(crate) fn checked(self) -> Result<Self, CollectiveError> {
        let (rank, size) = (self.rank, self.size);
        let most = Self::MAX_SIZE;
        if !(1..=most).contains(&size) {
            return Err(setting(format!("a group of {size} ranks; it takes from 1 to {most}")));
        }
        if rank >= size {
            return Err(setting(format!("rank {rank} of {size}: ranks are from 0 to {}", size - 1)));
        }
        if size > 1 && self.address.ends_with(":0") {
            return Err(setting(format!(
                "rank 0's address {:?} has port 0, under which {size} ranks do not meet",
                self.address
            )));
        }
        if self.job.len() > Self::MAX_NAME {
            let (length, most) = (self.job.len(), Self::MAX_NAME);
            return Err(setting(format!("the job's name has {length} bytes; it takes at most {most}")));
        }
        if let Some(length) = self.host.as_ref().map(String::len).filter(|length| !Self::is_name(*length)) {
            let most = Self::MAX_NAME;
            return Err(setting(format!("the host's name has {length} bytes; it takes from 1 to {most}")));
        }
        Ok(self)
    }

    /// The longest name of a job or a host in bytes.
    pub(crate) const MAX_NAME: usize = 256;

    /// Returns whether a host's name may have this many bytes.
    fn is_name(length: usize) -> bool {
        (1..=Self::MAX_NAME).contains(&length)
    }
}

#[cfg(test)]
mod tests;
