//! Tests of the layout of buckets, and of the times of operations.

mod layout;
mod times;
