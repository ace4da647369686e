"""The words that stories are made of.  A change here changes every text made from a seed."""

SHE = (
    "Mira Anna Clara Ella Nora Lena Ruth Ivy Rosa Greta Hilda Alma Edith Flora Iris Jane Kara "
    "Lily Mabel Nina Olga Paula Rita Sara Tessa Una Vera Wilma Zoe Agnes Bella Cora Dora Elsa "
    "Freya Gemma Hazel Ida June Kate Lucy Maya Nell Opal Pearl Rose Stella Thea Ursula Violet "
    "Wanda Yara Zelda Amina Petra Sonia"
).split()
HE = (
    "Tom Ben Carl Dan Eric Finn Gus Hugo Ivan Jack Karl Leo Max Ned Otto Paul Rolf Sam Tim Uwe "
    "Victor Walt Adam Boris Colin David Emil Frank Georg Hans Igor Jonas Kurt Luke Mark Nils "
    "Oscar Peter Ralf Simon Theo Urban Vince Will Yuri Zack Arthur Bruno Casper Dirk Edgar Felix "
    "Gilbert Henry Jasper Milo"
).split()
TRADES = {
    "baker": ("kneaded the dough", "lit the oven", "carried warm bread to the market"),
    "smith": ("mended an iron gate", "heated the forge", "shaped a small hook"),
    "farmer": ("fed the hens", "ploughed the lower field", "stacked the dry hay"),
    "fisher": ("mended the nets", "rowed out before dawn", "sorted the silver fish"),
    "teacher": ("read aloud to the children", "wrote sums on the board", "rang the school bell"),
    "tailor": ("cut a length of cloth", "sewed on nine buttons", "pressed a grey coat"),
    "miller": ("filled the sacks with flour", "cleaned the great wheel", "swept the mill floor"),
    "gardener": ("watered the beans", "planted a row of tulips", "cut back the hedge"),
    "sailor": ("coiled the ropes", "patched the sail", "watched the tide"),
    "carpenter": ("planed a long board", "built a narrow shelf", "sharpened the saw"),
    "doctor": ("bound a sore hand", "mixed a bitter tea", "visited the sick"),
    "weaver": ("set up the loom", "dyed the wool", "wove a striped rug"),
    "potter": ("turned a tall jug", "fired the kiln", "painted six bowls"),
    "shepherd": ("counted the sheep", "climbed to the high meadow", "called the dog"),
    "clerk": ("copied a letter", "filed the old papers", "sealed the envelope"),
    "painter": ("mixed the paints", "sketched the harbour", "framed a picture"),
}
ANIMALS = "dog cat fox goat pony crow goose rabbit donkey hen lamb parrot squirrel owl".split()
COLOURS = (
    "red blue green yellow brown black white grey silver golden purple orange pink amber scarlet "
    "copper ivory violet crimson pale dark bright"
).split()
THINGS = (
    "lantern cup key ring book coat drum bell kite boat box chair clock crown flute glass hat "
    "jar kettle knife ladder lamp map mask mirror needle pearl pen pipe plate pot purse ribbon "
    "rope saddle scarf shell shield shoe spoon stone sword table tent torch trumpet vase wagon "
    "watch wheel whistle anchor basket blanket bottle bucket candle feather"
).split()
FOODS = (
    "soup;fresh bread;apple pie;cheese;plum jam;roast fish;honey cake;boiled eggs;pea stew;"
    "warm milk;mushrooms;pancakes;dumplings;pears;walnuts;butter biscuits"
).split(";")
SPOTS = (
    "old mill;stone bridge;market square;north gate;town well;river bank;quiet harbour;school "
    "yard;chapel hill;oak forest;lower meadow;lighthouse;railway station;inn by the road;long "
    "pier;abandoned tower;frozen pond;apple orchard;windy cliff;narrow lane;post office;"
    "empty barn;great hall;salt caves"
).split(";")
WEATHER = ("cold;warm;windy;rainy;foggy;bright;quiet;stormy;dusty;frosty;grey;mild;wet;clear").split(";")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
TIMES = "morning noon evening night dawn dusk afternoon".split()
FEELINGS = (
    "happy;tired;proud;worried;calm;hungry;curious;afraid;angry;cheerful;lonely;sleepy;"
    "patient;grateful;puzzled;restless"
).split(";")
COUNTED = (
    "boats;geese;ducks;wagons;sacks of flour;candles;stars;lamps;horses;baskets;old coins;"
    "children;white stones;apples;letters;steps;barrels;trees"
).split(";")
ADVERBS = (
    "Soon;Later;After a while;Then;At last;Before long;A little later;Once more;Without a word;As always;For once"
).split(";")
ONSETS = "b br d dr f fl g gr h j k kr l m n p pr r s st t tr v w z th sh".split()
VOWELS = "a e i o u a e o ei au".split()
CODAS = "l n r m s nd th k rn st".split()
# Ordinary words for memos; mixed with the lists above.
PLAIN = (
    "river winter corner summer window garden letter music silence thunder village morning paper "
    "sugar pepper copper timber marble island mountain valley shadow signal engine ticket market "
    "butter cotton velvet harvest journey number pattern season station story supper temper tower "
    "water weather wonder yellow circle desert dinner doctor finger forest hammer hunter ladder "
    "lemon lesson magnet meadow member mirror nature orange packet parent pencil person planet "
    "pocket prince puzzle record rocket sailor school second secret shelter simple sister spider "
    "spring square street string sudden system tailor target temple theory tunnel turtle"
).split()
