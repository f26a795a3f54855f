//! The matrix unit of some x86-64 processors (AMX): eight tile registers of up to 16 rows of 64 bytes, and instructions
//! that multiply two of them and add to a third. In 8-bit integers sums are exact. In bfloat16 with sums in single
//! precision, a step is a chain of fused multiply-adds of the even elements from 0, one of the odd ones, then both are
//! added, and the result to the sum; subnormal numbers are zeros.
//!
//! Rust has no stable intrinsics for it, but its assembler knows the instructions.

/// True when this machine has tiles and their products in bfloat16 and 8-bit integers, and the system lets this process use them.
pub fn is_supported() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        use std::sync::OnceLock;
        static SUPPORTED: OnceLock<bool> = OnceLock::new();
        *SUPPORTED.get_or_init(|| unit::is_present() && unit::is_granted())
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    {
        false
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use unit::{AttentionTiles, IntegerAttentionTiles, IntegerTiles, STEP_COLUMNS, TILE_ROWS, Tiles};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod unit {
    use std::arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count, _xgetbv},
    };

    /// Most rows of activations in a product.
    pub const TILE_ROWS: usize = 16;
    /// Columns that one product sums over.
    pub const STEP_COLUMNS: usize = 32;

    /// Floats of one sum.
    const SUM: usize = TILE_ROWS * 16;

    /// Of the request for a state component, and the component that tile data is.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;

    /// True when the processor has the unit and the system saves its state.
    pub fn is_present() -> bool {
        let has_xsave = __cpuid(1).ecx >> 27 & 1 == 1;
        let features = __cpuid_count(7, 0).edx;
        let has_tiles = features >> 24 & 1 == 1;
        let has_products = features >> 22 & 1 == 1 && features >> 25 & 1 == 1;
        has_xsave && has_tiles && has_products && {
            // SAFETY: the system has switched XSAVE on.
            let saved = unsafe { saved_state() };
            saved >> 17 & 0b11 == 0b11
        }
    }

    #[target_feature(enable = "xsave")]
    unsafe fn saved_state() -> u64 {
        // SAFETY: register 0 exists wherever XSAVE does.
        unsafe { _xgetbv(0) }
    }

    /// Asks for the right to use tile data, once for the whole process; later threads inherit it.
    pub fn is_granted() -> bool {
        // SAFETY: the call changes only what this process may do.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    impl Configuration {
        /// Sums in tiles 0 to 3, activations in 4 and 5, weights in 6 and 7.
        const fn new(activation_rows: usize) -> Configuration {
            let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
            let mut tile = 0;
            while tile < 8 {
                row_bytes[tile] = 64;
                rows[tile] = if tile < 6 { activation_rows as u8 } else { 16 };
                tile += 1;
            }
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
        }
    }

    macro_rules! load {
        ($tile:literal, $from:expr, $stride:expr) => {
            asm!(
                concat!("tileloadd ", $tile, ", [{from} + {stride}*1]"),
                from = in(reg) $from,
                stride = in(reg) $stride,
                options(nostack, preserves_flags, readonly),
            )
        };
    }

    /// As `load`, of what will not be read again before other data: it should not push that out of the first-level cache.
    macro_rules! load_once {
        ($tile:literal, $from:expr, $stride:expr) => {
            asm!(
                concat!("tileloaddt1 ", $tile, ", [{from} + {stride}*1]"),
                from = in(reg) $from,
                stride = in(reg) $stride,
                options(nostack, preserves_flags, readonly),
            )
        };
    }

    macro_rules! store {
        ($tile:literal, $to:expr, $stride:expr) => {
            asm!(
                concat!("tilestored [{to} + {stride}*1], ", $tile),
                to = in(reg) $to,
                stride = in(reg) $stride,
                options(nostack, preserves_flags),
            )
        };
    }

    macro_rules! multiply {
        ($index:expr, $a:literal, $b:literal) => {
            multiply!("tdpbf16ps", $index, $a, $b)
        };
        ($operation:literal, $index:expr, $a:literal, $b:literal) => {
            match $index {
                0 => asm!(concat!($operation, " tmm0, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
                1 => asm!(concat!($operation, " tmm1, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
                2 => asm!(concat!($operation, " tmm2, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
                _ => asm!(concat!($operation, " tmm3, ", $a, ", ", $b), options(nostack, preserves_flags, nomem)),
            }
        };
    }

    /// This thread's tile registers, configured, with sums in tiles 0 to 3; given back when dropped, since their state slows
    /// the switch to another thread.
    struct Registers(());

    impl Registers {
        /// # Safety
        /// The unit is supported, the configuration is valid, and this thread has no other registers configured.
        unsafe fn configure(configuration: &Configuration) -> Registers {
            // SAFETY: by the contract; no compiled code uses tiles.
            unsafe { asm!("ldtilecfg [{}]", in(reg) configuration, options(nostack, preserves_flags, readonly)) };
            Registers(())
        }

        #[inline(always)]
        fn clear(&self) {
            // SAFETY: the tiles are configured.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, preserves_flags, nomem)
                );
            }
        }

        /// Writes sum `INDEX`, rows `stride` bytes apart.
        ///
        /// # Safety
        /// The tile's bytes are writable at each row.
        #[inline(always)]
        unsafe fn store<const INDEX: usize>(&self, to: *mut u8, stride: usize) {
            // SAFETY: by the contract; the tiles are configured.
            unsafe {
                match INDEX {
                    0 => store!("tmm0", to, stride),
                    1 => store!("tmm1", to, stride),
                    2 => store!("tmm2", to, stride),
                    _ => store!("tmm3", to, stride),
                }
            }
        }
    }

    impl Drop for Registers {
        fn drop(&mut self) {
            // SAFETY: the thread has them configured.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        }
    }

    /// The tile registers for products of matrices.
    pub struct Tiles(Registers);

    impl Tiles {
        /// Configures the registers of the calling thread for products of 1 to 16 rows.
        ///
        /// # Safety
        /// The unit [is supported](super::is_supported), and this thread has no other `Tiles`.
        pub unsafe fn configure(rows: usize) -> Tiles {
            debug_assert!((1..=TILE_ROWS).contains(&rows));
            // SAFETY: by the contract; the configuration is valid.
            Tiles(unsafe { Registers::configure(&Configuration::new(rows)) })
        }
    }

    impl Tiles {
        /// Clears all four sums.
        #[inline(always)]
        pub fn clear(&self) {
            self.0.clear();
        }

        /// Adds the products of 32 columns of one or (`TWO`) two blocks of rows and one or (`PAIR`) two tiles of weights.
        ///
        /// Rows are 64 bytes apart; weights are `[column / 2][output][2]`.
        ///
        /// # Safety
        /// 64 bytes are readable at each configured row of each block that is used, and 1024 at each tile of weights.
        #[inline(always)]
        pub unsafe fn multiply<const PAIR: bool, const TWO: bool>(
            &self,
            rows: [*const u8; 2],
            weights: [*const u8; 2],
        ) {
            // SAFETY: by the contract; the tiles are configured for these shapes.
            unsafe {
                load!("tmm6", weights[0], 64usize);
                load_once!("tmm4", rows[0], 64usize);
                multiply!(0, "tmm4", "tmm6");
                if PAIR {
                    load!("tmm7", weights[1], 64usize);
                    multiply!(1, "tmm4", "tmm7");
                }
                if TWO {
                    load_once!("tmm5", rows[1], 64usize);
                    multiply!(2, "tmm5", "tmm6");
                }
                if PAIR && TWO {
                    multiply!(3, "tmm5", "tmm7");
                }
            }
        }

        /// Reads the sums back that [`Tiles::store`] has written.
        ///
        /// # Safety
        /// As [`Tiles::store`], to read.
        #[inline(always)]
        pub unsafe fn load(&self, from: *const f32, pair: bool, two: bool) {
            // SAFETY: by the contract.
            unsafe {
                load!("tmm0", from, 64usize);
                if pair {
                    load!("tmm1", from.add(SUM), 64usize);
                }
                if two {
                    load!("tmm2", from.add(2 * SUM), 64usize);
                }
                if pair && two {
                    load!("tmm3", from.add(3 * SUM), 64usize);
                }
            }
        }

        /// Writes the sums, `[block of rows][tile][16][16]`, of the blocks and tiles that were used.
        ///
        /// # Safety
        /// That many floats are writable.
        #[inline(always)]
        pub unsafe fn store(&self, to: *mut f32, pair: bool, two: bool) {
            // SAFETY: by the contract.
            unsafe {
                store!("tmm0", to, 64usize);
                if pair {
                    store!("tmm1", to.add(SUM), 64usize);
                }
                if two {
                    store!("tmm2", to.add(2 * SUM), 64usize);
                }
                if pair && two {
                    store!("tmm3", to.add(3 * SUM), 64usize);
                }
            }
        }
    }

    /// The tile registers for products of 8-bit integers; otherwise as [`Tiles`].
    pub struct IntegerTiles(Registers);

    impl IntegerTiles {
        /// Products in tiles 0 and 1, activations in 4, weights in 6.
        const CONFIGURATION: Configuration = {
            let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
            (row_bytes[0], row_bytes[1], row_bytes[4], row_bytes[6]) = (64, 64, STEP_COLUMNS as u16, 64);
            (rows[0], rows[1], rows[4], rows[6]) = (TILE_ROWS as u8, TILE_ROWS as u8, TILE_ROWS as u8, 8);
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
        };

        /// Configures the registers of the calling thread for products of 16 rows.
        ///
        /// # Safety
        /// The unit [is supported](super::is_supported), and this thread has no other tiles.
        pub unsafe fn configure() -> IntegerTiles {
            // SAFETY: by the contract; the configuration is valid.
            IntegerTiles(unsafe { Registers::configure(&IntegerTiles::CONFIGURATION) })
        }

        /// Writes the products of 32 columns, `[row][16 outputs]`; the next call may go through the `OTHER` registers to
        /// begin before this one has ended.
        ///
        /// Rows of activations are `stride` bytes apart; weights are `[column / 4][output][4]`. Both are signed.
        ///
        /// # Safety
        /// 32 bytes are readable at each of 16 rows, 512 at the weights, and 1024 are writable at `to`.
        #[inline(always)]
        pub unsafe fn multiply<const OTHER: bool>(
            &self,
            rows: *const u8,
            stride: usize,
            weights: *const u8,
            to: *mut i32,
        ) {
            // SAFETY: by the contract; the tiles are configured for these shapes.
            unsafe {
                load!("tmm4", rows, stride);
                load!("tmm6", weights, 64usize);
                if OTHER {
                    asm!("tilezero tmm1", "tdpbssd tmm1, tmm4, tmm6", options(nostack, preserves_flags, nomem));
                    store!("tmm1", to, 64usize);
                } else {
                    asm!("tilezero tmm0", "tdpbssd tmm0, tmm4, tmm6", options(nostack, preserves_flags, nomem));
                    store!("tmm0", to, 64usize);
                }
            }
        }
    }

    /// The tile registers as attention uses them; otherwise as [`Tiles`].
    pub struct AttentionTiles(Registers);

    impl AttentionTiles {
        /// Sums in tiles 0 to 3, queries in 4, keys in 5, probabilities in 6, values in 7.
        const fn configuration(rows: u8) -> Configuration {
            let (mut row_bytes, mut tile_rows) = ([0; 16], [0; 16]);
            let mut tile = 0;
            while tile < 8 {
                row_bytes[tile] = 64;
                tile_rows[tile] = rows;
                tile += 1;
            }
            tile_rows[5] = 16;
            row_bytes[6] = 32;
            tile_rows[7] = 8;
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows: tile_rows }
        }

        /// Configures the registers of the calling thread for 1 to 16 rows of queries.
        ///
        /// # Safety
        /// The unit [is supported](super::is_supported), and this thread has no other tiles.
        pub unsafe fn configure(rows: usize) -> AttentionTiles {
            debug_assert!((1..=TILE_ROWS).contains(&rows));
            // SAFETY: by the contract; the configuration is valid.
            AttentionTiles(unsafe { Registers::configure(&AttentionTiles::configuration(rows as u8)) })
        }

        /// Clears the four sums.
        #[inline(always)]
        pub fn clear(&self) {
            self.0.clear();
        }

        /// Loads 32 dimensions of the queries, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 64 bytes are readable at each row.
        #[inline(always)]
        pub unsafe fn load_queries(&self, from: *const u16, stride: usize) {
            // SAFETY: by the contract.
            unsafe { load!("tmm4", from, stride) };
        }

        /// Adds the products with 32 dimensions of 16 keys, `[16 pairs][16][2]`, to sum `INDEX`.
        ///
        /// # Safety
        /// 1024 bytes are readable.
        #[inline(always)]
        pub unsafe fn add_scores<const INDEX: usize>(&self, keys: *const u16) {
            // SAFETY: by the contract.
            unsafe {
                load!("tmm5", keys, 64usize);
                multiply!(INDEX, "tmm4", "tmm5");
            }
        }

        /// Loads the probabilities of 16 positions, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 32 bytes are readable at each row.
        #[inline(always)]
        pub unsafe fn load_probabilities(&self, from: *const u16, stride: usize) {
            // SAFETY: by the contract.
            unsafe { load!("tmm6", from, stride) };
        }

        /// Adds the products with 16 dimensions of 16 values, `[8 pairs][16][2]`, pairs `stride` bytes apart, to sum
        /// `INDEX`.
        ///
        /// # Safety
        /// 64 bytes are readable at each pair.
        #[inline(always)]
        pub unsafe fn add_values<const INDEX: usize>(&self, values: *const u16, stride: usize) {
            // SAFETY: by the contract.
            unsafe {
                load!("tmm7", values, stride);
                multiply!(INDEX, "tmm6", "tmm7");
            }
        }

        /// Writes 16 columns of sum `INDEX`, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 64 bytes are writable at each row.
        #[inline(always)]
        pub unsafe fn store<const INDEX: usize>(&self, to: *mut f32, stride: usize) {
            // SAFETY: by the contract.
            unsafe { self.0.store::<INDEX>(to.cast(), stride) };
        }
    }

    /// The tile registers as attention over 8-bit keys and values uses them; otherwise as [`AttentionTiles`].
    pub struct IntegerAttentionTiles {
        registers: Registers,
        dimensions: usize,
    }

    impl IntegerAttentionTiles {
        /// Sums in tiles 0 to 3, queries in 4, keys in 5, weights in 6, values in 7.
        const fn configuration(rows: u8, dimensions: usize) -> Configuration {
            let (mut row_bytes, mut tile_rows) = ([0; 16], [0; 16]);
            let mut tile = 0;
            while tile < 8 {
                row_bytes[tile] = 64;
                tile_rows[tile] = rows;
                tile += 1;
            }
            row_bytes[4] = dimensions as u16;
            tile_rows[5] = (dimensions / 4) as u8;
            row_bytes[6] = 16;
            tile_rows[7] = 4;
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows: tile_rows }
        }

        /// Configures the registers of the calling thread for 1 to 16 rows of queries; the head size is a multiple of 32.
        ///
        /// # Safety
        /// The unit [is supported](super::is_supported), and this thread has no other tiles.
        pub unsafe fn configure(rows: usize, head_size: usize) -> IntegerAttentionTiles {
            debug_assert!((1..=TILE_ROWS).contains(&rows));
            let dimensions = if head_size.is_multiple_of(64) { 64 } else { 32 };
            // SAFETY: by the contract; the configuration is valid.
            let registers =
                unsafe { Registers::configure(&IntegerAttentionTiles::configuration(rows as u8, dimensions)) };
            IntegerAttentionTiles { registers, dimensions }
        }

        /// Dimensions that are multiplied at once.
        pub fn dimensions(&self) -> usize {
            self.dimensions
        }

        /// Clears the four sums.
        #[inline(always)]
        pub fn clear(&self) {
            self.registers.clear();
        }

        /// Loads some dimensions of a plane of the queries, signed bytes, rows `stride` bytes apart.
        ///
        /// # Safety
        /// [`IntegerAttentionTiles::dimensions`] bytes are readable at each row.
        #[inline(always)]
        pub unsafe fn load_queries(&self, from: *const u8, stride: usize) {
            // SAFETY: by the contract.
            unsafe { load!("tmm4", from, stride) };
        }

        /// Adds the products with as many dimensions of 16 keys, unsigned bytes `[dimensions / 4][16][4]`, to sum `INDEX`.
        ///
        /// # Safety
        /// The keys are readable.
        #[inline(always)]
        pub unsafe fn add_scores<const INDEX: usize>(&self, keys: *const u8) {
            // SAFETY: by the contract.
            unsafe {
                load!("tmm5", keys, 64usize);
                multiply!("tdpbsud", INDEX, "tmm4", "tmm5");
            }
        }

        /// Loads a plane of the weights of 16 positions, unsigned bytes, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 16 bytes are readable at each row.
        #[inline(always)]
        pub unsafe fn load_weights(&self, from: *const u8, stride: usize) {
            // SAFETY: by the contract.
            unsafe { load!("tmm6", from, stride) };
        }

        /// Adds the products with 16 dimensions of 16 values, signed bytes `[4][16][4]`, fours of positions `stride` bytes
        /// apart, to sum `INDEX`.
        ///
        /// # Safety
        /// 64 bytes are readable at each four.
        #[inline(always)]
        pub unsafe fn add_values<const INDEX: usize>(&self, values: *const u8, stride: usize) {
            // SAFETY: by the contract.
            unsafe {
                load!("tmm7", values, stride);
                multiply!("tdpbusd", INDEX, "tmm6", "tmm7");
            }
        }

        /// Writes 16 columns of sum `INDEX`, rows `stride` bytes apart.
        ///
        /// # Safety
        /// 64 bytes are writable at each row.
        #[inline(always)]
        pub unsafe fn store<const INDEX: usize>(&self, to: *mut i32, stride: usize) {
            // SAFETY: by the contract.
            unsafe { self.registers.store::<INDEX>(to.cast(), stride) };
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use half::bf16;

    use super::*;
    use crate::simd::random_bits;

    #[test]
    fn products_equal_chains_of_fused_multiply_adds() {
        if !is_supported() {
            return;
        }
        let mut random = random_bits(5);
        let mut elements = |n: usize| -> Vec<bf16> {
            (0..n).map(|_| bf16::from_f32(random() as i32 as f32 / 2f32.powi(31))).collect()
        };
        let (rows, weights) = (elements(2 * TILE_ROWS * STEP_COLUMNS), elements(2 * 16 * STEP_COLUMNS));
        let expected = |block: usize, tile: usize, row: usize, output: usize| -> f32 {
            let chain = |parity: usize| {
                (0..STEP_COLUMNS / 2).fold(0.0f32, |sum, pair| {
                    let x = rows[(block * TILE_ROWS + row) * STEP_COLUMNS + 2 * pair + parity];
                    let w = weights[tile * 16 * STEP_COLUMNS + (pair * 16 + output) * 2 + parity];
                    x.to_f32().mul_add(w.to_f32(), sum)
                })
            };
            chain(0) + chain(1)
        };
        for configured in [1, 7, 16] {
            for (pair, two) in [(false, false), (false, true), (true, false), (true, true)] {
                let mut sums = [f32::NAN; 4 * 256];
                let row = |block: usize| rows[block * TILE_ROWS * STEP_COLUMNS..].as_ptr().cast();
                let weight = |tile: usize| weights[tile * 16 * STEP_COLUMNS..].as_ptr().cast();
                // SAFETY: supported; the buffers have the sizes.
                unsafe {
                    let tiles = Tiles::configure(configured);
                    tiles.clear();
                    match (pair, two) {
                        (false, false) => tiles.multiply::<false, false>([row(0), row(1)], [weight(0), weight(1)]),
                        (false, true) => tiles.multiply::<false, true>([row(0), row(1)], [weight(0), weight(1)]),
                        (true, false) => tiles.multiply::<true, false>([row(0), row(1)], [weight(0), weight(1)]),
                        (true, true) => tiles.multiply::<true, true>([row(0), row(1)], [weight(0), weight(1)]),
                    }
                    tiles.store(sums.as_mut_ptr(), pair, two);
                    tiles.clear();
                    tiles.load(sums.as_ptr(), pair, two);
                    tiles.store(sums.as_mut_ptr(), pair, two);
                }
                for (index, found) in sums.into_iter().enumerate() {
                    let (block, tile, row, output) = (index / 512, index / 256 % 2, index / 16 % 16, index % 16);
                    if row < configured && (pair || tile == 0) && (two || block == 0) {
                        assert_eq!(found, expected(block, tile, row, output), "{configured} rows, element {index}");
                    } else {
                        assert!(found.is_nan(), "{configured} rows, element {index}");
                    }
                }
            }
        }
    }
}
